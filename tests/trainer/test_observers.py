import pytest
import torch

from tests.marks import extended
from tests.trainer.conftest import Pair, Regression, assert_same_bits
from trainer.diagnosis import shapes
from trainer.diagnosis.headroom import Headroom
from trainer.diagnosis.histogram import Histogram
from trainer.diagnosis.replay import Replay

VALUES = {
    "training": {"steps": 60},
    "scaler": {"init_scale": 2.0**20, "growth_interval": 30},
    "diagnosis": {"histogram_every_steps": 5, "headroom_every_steps": 5, "replay_skips": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "moment", "name"),
    [
        (Replay, "before_step", "replay"),
        (Histogram, "after_step", "histogram"),
        (Headroom, "before_step", "headroom"),
        (shapes, "misfits", "check of the shapes"),
        *extended(
            [
                (Replay, "before_update", "replay"),
                (Replay, "receive", "replay"),
                (Histogram, "before_clip", "histogram"),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory left"), *extended([KeyError("x")])]
)
def test_a_diagnosis_that_fails_ends_no_run(run_loop, monkeypatch, owner, moment, name, error):
    """A failing diagnosis is reported once as an event, and the run's bits are unchanged."""
    alone = run_loop(Pair, VALUES)

    def failing(*_arguments):
        raise error

    monkeypatch.setattr(owner, moment, failing)
    run = run_loop(Pair, VALUES)
    [result] = run.of("failed_diagnosis")
    assert result["diagnosis"] == name
    assert type(error).__name__ in result["error"]
    assert_same_bits(run.weights(), alone.weights())
    assert run.records["loss"].tolist() == alone.records["loss"].tolist()


@pytest.mark.parametrize("made", [{"no suffix": b"text"}, None])
def test_artifacts_that_fail_end_no_run(run_loop, tmp_path, made):
    """An invalid artifact name, or a failing method, is reported, and metrics are recorded."""

    class Showing(Regression):
        def evaluate(self):
            return {"val/loss": 0.5}

        def artifacts(self):
            if made is None:
                raise OSError("no font")
            return made

    run = run_loop(Showing, {"training": {"steps": 3}}, tmp_path / "checkpoints")
    [result] = run.of("failed_diagnosis")
    assert result["diagnosis"] == "creation of artifacts"
    assert [event["value"] for event in run.of("metric", name="val/loss")] == [0.5]
