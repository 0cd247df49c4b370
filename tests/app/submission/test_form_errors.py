"""Errors in the forms of runs and sweeps have the label of their field and a link to it."""

import re

from starlette.testclient import TestClient

from db.database import Database
from db.files import checkpoints
from db.tables import Run
from tests.app.submission.new_run_pages_made import FORM
from tests.db.files.checkpoints_made import make_saved
from tests.marks import looped
from tests.spool_made import checkpoint_of

QUEUE = {"priority": "high", "devices_per_node": "none"}
SWEEP = dict.fromkeys(("kind", "pruner", "runs", "first", "seed", "goal"), "x")
COMMAND = {
    "command.line": "python {lr}",
    "command.folder": "a\0",
    "command.variables": "A",
    "command.secrets": "NONE",
    "parameter.lr.kind": "number",
    "parameter.lr.value": "1",
    "parameter.lr.maximum": "much",
}
ERROR = re.compile(r'<li>\s*<a href="#(.+?)">(.+?)</a>', re.S)


@looped(
    "address, form",
    [
        (
            "/runs",
            FORM | QUEUE | {"nodes": "x", "after_id": "x", "training.steps": "x", "precision": "x"},
        ),
        ("/runs", FORM | {"tags": "x" * 9999, "name": "x" * 999, "project": "none"}),
        ("/runs", FORM | {"parent_id": "9", "parent_step": "1"}),
        ("/runs", FORM | {"compared_with": "9"}),
        ("/presets", FORM | {"preset": ""}),
        ("/runs/new/command", COMMAND | QUEUE | {"after_id": "x"}),
        ("/sweeps", FORM | SWEEP | QUEUE | {"nodes": "x", "at_once": "x"}),
        ("/sweeps", FORM | {"metric": ""}),
        ("/sweeps", FORM | {"training.steps": "1, 1", "training.batch_size": "uniform(1, 2)"}),
        ("/sweeps", FORM),
        ("/sweeps/command", COMMAND | SWEEP | QUEUE),
        ("/sweeps/command", {"command.line": "python '"}),
        ("/sweeps/agents", SWEEP),
        ("/sweeps/agents", {"settings": "a"}),
    ],
)
def test_errors_name_fields_by_their_labels(
    offered: None, browser: TestClient, address: str, form: dict[str, str]
) -> None:
    """Form errors name no paths, and each links to an element of the page."""
    answer = browser.post(address, data=form)
    assert answer.status_code == 422
    errors = ERROR.findall(answer.text)
    assert errors
    for path, label in errors:
        assert re.fullmatch(r"[A-Z][\w ]+|<code>\{lr\}</code>", label), path
        assert f'id="{path}"' in answer.text, path


def test_a_fork_with_too_few_steps_says_so_at_the_field(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A fork with too few steps gets an error at the field: the steps are the total."""
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(10)), ["key-10"])
    fork = FORM | {"training.steps": "5", "parent_id": str(running.id), "parent_step": "10"}
    page = browser.post("/runs", data=fork).text
    assert ERROR.findall(page) == [("training.steps", "Steps")]
    assert "5 steps in all are not beyond the checkpoint&#39;s step 10" in page
    assert 'id="training.steps-error"' in page
