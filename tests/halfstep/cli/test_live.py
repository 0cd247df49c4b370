"""Live status of runs: `run follow`, `--wait`, `top`."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from db.database import Database
from db.queue import queue
from db.tables import Run, Status, User
from halfstep import Client
from tests.app.conftest import start_run
from tests.site import SECONDS, halfstep, heed, type_command

pytestmark = pytest.mark.slow


@pytest.fixture
def known(address: str, token: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the environment of a signed-in user, also in this process."""
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    return known


class Terminal:
    """A command that runs in its own terminal."""

    def __init__(self, *words: str) -> None:
        self._end, other_end = pty.openpty()
        command = [sys.executable, "-m", "halfstep.cli.main", *words]
        with heed(signal.SIGINT):
            self.process = subprocess.Popen(
                command,
                stdin=other_end,
                stdout=other_end,
                stderr=other_end,
                env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
            )
        os.close(other_end)
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Read until the terminal has shown this text."""
        deadline = time.monotonic() + SECONDS
        while text not in self.text:
            assert time.monotonic() < deadline
            self.text += os.read(self._end, 65536).decode(errors="replace")

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read to the end; return the exit code."""
        try:
            while piece := os.read(self._end, 65536):
                self.text += piece.decode(errors="replace")
        except OSError:  # the other end is closed
            pass
        os.close(self._end)
        return self.process.wait(SECONDS)


def test_a_run_is_followed_on_one_line_of_a_terminal(
    known: dict[str, str], database: Database, running: Run
) -> None:
    """`run follow` redraws one line with the result last; its exit code is the run's outcome."""
    terminal = Terminal("run", "follow", str(running.id))
    terminal.wait_for(f"run {running.id}  running")
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.CANCELLED)
    assert terminal.end() == 4
    assert f"run {running.id}  cancelled" in terminal.text
    assert terminal.text.count("\n") == 1


def test_ctrl_c_ends_the_following_and_not_the_run(
    known: dict[str, str], client: Client, running: Run
) -> None:
    """Ctrl-C ends `run follow` with exit code 130, and the run continues."""
    terminal = Terminal("run", "follow", str(running.id))
    terminal.wait_for("running")
    terminal.interrupt()
    assert terminal.end() == 130
    assert "Traceback" not in terminal.text
    assert client.run(running.id)["status"] == "running"


def test_top_refreshes_a_table_of_running_runs(
    known: dict[str, str], database: Database, ada: User, running: Run, client: Client
) -> None:
    """`top` lists running runs only, adds those that start, and ends by Ctrl-C."""
    terminal = Terminal("top", "--interval", "0.2")
    terminal.wait_for("Running: 1")
    started = start_run(database, ada)
    client.submit("digits", {}, name="waits")
    terminal.wait_for("Running: 2")
    with database.writing() as session:
        queue.end(session, started.id, started.attempt, Status.FINISHED)
    terminal.text = ""
    terminal.wait_for("Running: 1")
    terminal.interrupt()
    assert terminal.end() == 0
    assert "waits" not in terminal.text


def test_top_prints_once_where_there_is_no_terminal(
    known: dict[str, str], running: Run, client: Client
) -> None:
    """Without a terminal `top` prints once, as a table or JSON."""
    head, row = halfstep("top", **known).stdout.splitlines()
    assert set(head.split()) >= {"Run", "Loss", "Scale", "Skipped", "Health", "ETA"}
    assert row.split()[:3] == [str(running.id), running.name, "running"]
    result = json.loads(halfstep("top", "--json", **known).stdout)
    assert (result["id"], result["status"]) == (running.id, "running")


def test_top_says_that_nothing_runs(known: dict[str, str], client: Client) -> None:
    """Without a terminal `top` says that nothing is running instead of printing an empty table."""
    ended = halfstep("top", **known)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "no run is running" in ended.stderr


def test_the_page_of_a_run_is_opened(
    known: dict[str, str],
    running: Run,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page of a run is opened and its link printed; a missing run is an error."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    link = f"{known['HALFSTEP_URL']}/runs/{running.id}"
    assert type_command("run", "open", str(running.id)) == 0
    assert (capsys.readouterr().out, opened) == (f"{link}\n", [link])
    assert type_command("run", "open", str(running.id), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"url": link}
    assert "no run 99" in str(type_command("run", "open", "99"))
    assert len(opened) == 2
