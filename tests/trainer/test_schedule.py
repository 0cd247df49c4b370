import numpy as np
import pytest

from halfstep.run_config import ConfigError
from tests.trainer.conftest import Pair, assert_same_bits
from trainer.recipes.digits import Digits
from trainer.schedule import learning_rate_factor

VALUES = {
    "training": {
        "steps": 60,
        "schedule": "cosine",
        "warmup_steps": 12,
        "schedule_counts": "applied",
    },
    "scaler": {"growth_interval": 10},
}


@pytest.mark.slow
def test_a_schedule_of_applied_steps_does_not_advance_at_a_skip(run_loop):
    """With schedule_counts "applied" a step's rate is that of the applied steps before it, plus
    one.

    Catches a count of attempts, and one that is off by the step under way.
    """
    run = run_loop(Digits, VALUES)
    skipped = (run.records["flags"] & 1).astype(int)
    assert 1 < skipped.sum() < 40
    applied_before = np.concatenate([[0], np.cumsum(1 - skipped)[:-1]])
    expected = [
        1e-3 * learning_rate_factor(run.recipe.config.training, int(n) + 1) for n in applied_before
    ]
    np.testing.assert_allclose(run.records["lr"], expected, rtol=1e-6)


@pytest.mark.slow
def test_without_skips_both_schedules_give_the_same_rates(run_loop):
    """Without skips the device's rates equal the host's, to fp32's precision."""
    values = VALUES | {"precision": "fp32"}
    attempted = values | {"training": values["training"] | {"schedule_counts": "attempted"}}
    rates = [run_loop(Digits, v).records["lr"] for v in (values, attempted)]
    np.testing.assert_allclose(*rates, rtol=1e-6, atol=1e-12)


def test_each_optimizer_counts_its_own_steps(run_loop):
    """With two optimizers the recorded rate follows the first one's applied steps."""
    values = VALUES | {"scaler": {"init_scale": 2.0**18, "growth_interval": 4}}
    run = run_loop(Pair, values)
    flags = run.records["flags"]
    first, second = (flags >> 8) & 1, (flags >> 9) & 1
    assert first.tolist() != second.tolist()
    applied_before = np.concatenate([[0], np.cumsum(1 - first.astype(int))[:-1]])
    expected = [
        1e-3 * learning_rate_factor(run.recipe.config.training, int(n) + 1) for n in applied_before
    ]
    np.testing.assert_allclose(run.records["lr"], expected, rtol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_continues_its_counts(run_loop, tmp_path):
    """Counts of applied steps are in the checkpoint, so a resumed run is bit-exact."""
    values = VALUES | {"checkpoints": {"every_steps": 30}}
    straight = run_loop(Digits, values, folder=tmp_path)
    resumed = run_loop(Digits, values, resume=tmp_path / "step-00000030.pt")
    assert resumed.records["lr"].tobytes() == straight.records["lr"][30:].tobytes()
    assert_same_bits(resumed.weights(), straight.weights())


def test_an_unfused_optimizer_cannot_count_applied_steps(run_loop):
    """An unfused optimizer cannot count applied steps, since it reads the rate on the host."""
    with pytest.raises(ConfigError, match=r"schedule_counts is applied, but training\.fused"):
        run_loop(Digits, {"training": {"schedule_counts": "applied", "fused": False}})
