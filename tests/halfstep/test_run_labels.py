"""Labels of statuses, outcomes and health."""

from app.html.rendering import fragment
from app.runs import filters
from db.health.health_statement import TONES
from db.runs.outcomes import OUTCOMES
from db.tables import Status
from halfstep.cli import formats
from halfstep.run_labels import HEALTHS, STATES
from tests.halfstep.cli.formats_made import RUN
from tests.marks import looped


def test_every_state_has_a_label() -> None:
    """Every status, outcome and health has a label."""
    assert {*STATES} == {*Status, *OUTCOMES}
    assert {*HEALTHS} == {*TONES}


@looped("state", STATES)
def test_page_command_and_filter_have_one_word_for_a_state(state: str) -> None:
    """Page, command and filter use the same label of a status, and a filter accepts it."""
    is_outcome = state in OUTCOMES
    run = RUN | {"status": "finished", "outcome": state} if is_outcome else RUN | {"status": state}
    label = STATES[state]
    assert f">{label}<" in fragment(
        "run/_status_pill.html", run={"outcome": None, "damage": ""} | run
    )
    assert formats.state(run) == label.lower()
    words = f"status:{label.replace(' ', '_')}", f'status:"{label}"', f"status:{state}"
    assert len({str(filters.read(word, me="ada")) for word in words}) == 1
    [chip], _invalid = filters.chips(f"status:{state}")
    assert chip.value == label.lower()


@looped("word", HEALTHS)
def test_page_and_command_have_one_word_for_a_health(word: str) -> None:
    """List and command use the same label of a health."""
    run = RUN | {"health": {"word": word, "reason": "No step was skipped."}}
    assert formats.health(run) == HEALTHS[word].lower()
