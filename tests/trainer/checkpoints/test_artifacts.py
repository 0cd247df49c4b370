import hashlib

import numpy as np
import pytest

from halfstep.recipe import RecipeError
from tests.spool_made import fields_of
from tests.trainer.conftest import Regression
from trainer.checkpoints.artifacts import save_artifacts


class Drawing(Regression):
    """Leaves a text and some bytes after each evaluation."""

    def artifacts(self):
        assert not self.modules["model"].training
        return {"words.txt": "a € b", "image.png": b"\x89PNG"}


def test_artifacts_are_written_after_each_evaluation(run_loop, tmp_path):
    """Each evaluation's artifacts are complete files next to the checkpoints, with an event."""
    run = run_loop(
        Drawing,
        {"training": {"steps": 4}, "evaluation": {"every_steps": 2}},
        folder=tmp_path / "checkpoints",
    )
    events = run.of("artifact")
    assert [(e["step"], e["name"]) for e in events] == [
        (2, "words.txt"),
        (2, "image.png"),
        (4, "words.txt"),
        (4, "image.png"),
    ]
    assert events[0]["path"] == "artifacts/step-00000002/words.txt"
    for event in events:
        data = (tmp_path / event["path"]).read_bytes()
        assert event["size_bytes"] == len(data)
        assert event["sha256"] == hashlib.sha256(data).hexdigest()
    assert (tmp_path / events[0]["path"]).read_text() == "a € b"
    assert len(list(tmp_path.glob("artifacts/**/*.*"))) == 4  # and nothing partial


def test_an_artifact_may_be_anything_that_is_logged(tmp_path):
    """Any value that can be logged can be an artifact; without a suffix it gets its type's."""
    result = {"squares": np.eye(4), "a/b": "text", "table": [{"x": 1}], "kept.md": "# As it is"}
    events = [*map(fields_of, save_artifacts(tmp_path / "artifacts", 1, result))]
    assert [e["name"] for e in events] == ["squares.png", "a-b.txt", "table.csv", "kept.md"]
    assert (tmp_path / events[3]["path"]).read_text() == "# As it is"


@pytest.mark.parametrize(
    "name",
    [
        "../x.txt",
        "/etc/x.txt",
        "a/b.txt",
        ".hidden.txt",
        "",
        "..",
        "nosuffix",
        "a\n.txt",
        "a\0.txt",
    ],
)
def test_an_artifact_cannot_leave_its_folder(tmp_path, name):
    """An artifact whose name is no plain file name is refused before anything is written."""
    with pytest.raises(RecipeError, match="an artifact is named"):
        save_artifacts(tmp_path / "artifacts", 1, {"good.txt": "", name: b""})
    assert not list(tmp_path.iterdir())


def test_no_folder_saves_no_artifacts(run_loop):
    """A run without a folder saves no artifacts, and trains."""
    assert run_loop(Drawing).of("artifact") == []
