"""Terminal escape codes are removed from texts for people."""

from db.database import Database
from db.queue import queue
from db.runs import runs
from db.tables import Run, Status
from db.terminal_codes import without_codes
from tests.marks import looped


@looped(
    "line, text",
    [
        ("\x1b]8;;https://a\x1b\\link\x1b]8;;\x1b\\ after", "link after"),
        ("\x1b]8;id=1;https://a\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b[1mbold\x1b[0m \x1bPdata\x1b\\it", "bold it"),
        ("\x1b[31mred\x1b[0m \x1b[2K50 %", "red 50 %"),
        ("cut \x1b]8;;https://a", "cut "),
        ("cut \x1b]8;;https://a\nnext \x1b]8;;https://b\x1b[31mred", "cut \nnext red"),
    ],
)
def test_links_of_terminals_leave_nothing(line: str, text: str) -> None:
    """Terminal links by OSC 8 and similar sequences are removed, complete or not."""
    assert without_codes(line) == text


def test_the_outcome_of_a_run_has_no_codes(database: Database, running: Run) -> None:
    """Reason and error of a run have no terminal codes of the script's output."""
    link = "\x1b]8;;https://a\x1b\\link\x1b]8;;\x1b\\"
    with database.writing() as session:
        error = f"\x1b[31mred\x1b[0m\n{link}"
        reason = f"exit code 1: {link}"
        queue.end(session, running.id, running.attempt, Status.FAILED, reason=reason, error=error)
    with database.reading() as session:
        assert runs.get(session, running.id).error == "red\nlink"
        assert runs.statuses(session, running.id)[-1].reason == "exit code 1: link"
