import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfstep.config_groups import Scaler
from halfstep.recipe import Loss
from halfstep.run_config import ConfigError, parse_config
from halfstep.telemetry.spool import STEP_DTYPE
from tests.marks import extended, looped
from tests.trainer.conftest import Pair, Regression, assert_same_bits
from trainer.checkpoints import checkpoint
from trainer.distributed.ranks import Control, Request
from trainer.precision.scale_policies import CALIBRATED_AFTER, ScaleUnusableError, StopRule
from trainer.recipes.digits import Digits


class Overflowing(Regression):
    """A recipe whose loss is infinite from some batch on, except in fp32."""

    defaults = {"training": {"steps": 60, "batch_size": 8}, "scaler": {"init_scale": 64.0}}  # noqa: RUF012
    finite_batches = 40

    def training_step(self, batch):
        inputs, targets = batch
        self.finite_batches -= 1
        output = self.modules["model"](inputs)
        if self.finite_batches < 0 and torch.is_autocast_enabled("cpu"):
            output = (output.half() + 60000) * 2 / 2 - 60000  # 120,000 is more than fp16 holds
        yield Loss(F.mse_loss(output.float(), targets), "sgd")


def scale_as_described(records, settings):
    """Compute the scale of each step by the documented rules, from the recorded skips."""
    scale, tracker, patience, steps, skips = settings.init_scale, 0, settings.hysteresis, 0, 0
    scales = []
    for flags in records["flags"]:
        scales.append(scale)
        skipped, before, grown = bool(flags & 1), scale, False
        steps, skips = steps + 1, skips + skipped
        if skipped:
            tracker, patience = 0, patience - 1
            if patience <= 0 and skips >= settings.tolerance * steps:
                scale *= settings.backoff_factor
        else:
            tracker += 1
            if tracker == settings.growth_interval:
                scale, tracker, grown = scale * settings.growth_factor, 0, True
        if grown:
            patience = settings.hysteresis
        if scale != before:
            steps = skips = 0
        scale = min(max(scale, settings.floor or 0), settings.ceiling or 2.0**127)
    return scales


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, *extended([False])])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ceiling": 2.0**19, "init_scale": 2.0**18},
        {"floor": 2.0**21},
        {"tolerance": 0.3},  # fewer of the whole run's steps are skipped
        {"hysteresis": 2, "tolerance": 0.1, "floor": 2.0**10, "ceiling": 2.0**24},
        *extended([{"hysteresis": 3}, {"tolerance": 0.05}]),
    ],
)
def test_the_scale_moves_as_the_settings_say(run_loop, settings, fused):
    """At every step the scale equals that of a plain Python implementation of the rules.
    Patience that is not restored at a growth, a share counted over the whole run, and a ceiling
    that lets one growth through would be detected.
    """
    values = {
        "scaler": settings,
        "training": {"steps": 150, "fused": fused, "batch_size": 8},
        "recipe": {"width": 32},  # skips and grows as often as 128, in half the time
    }
    run = run_loop(Digits, values)
    expected = scale_as_described(run.records, run.recipe.config.scaler)
    assert run.records["scale"].tolist() == expected
    assert run.list_skipped() or "ceiling" in settings


def test_a_skip_at_the_floor_is_still_a_skip(run_loop):
    """A skip at the floor is recorded, although the scale does not fall."""
    run = run_loop(Digits, {"scaler": {"floor": 2.0**24}, "training": {"steps": 10}})
    assert run.list_skipped() == list(range(1, 11))
    assert set(run.records["scale"]) == {2.0**24}
    assert not run.of("scaler", kind="backoff")
    assert len(run.of("scaler", kind="skip")) == 10


def test_policies_with_two_optimizers_count_a_step_once(run_loop):
    """With two optimizers a step counts once for the scaler's hysteresis."""
    values = {"scaler": {"init_scale": 2.0**18, "hysteresis": 2, "growth_interval": 6}}
    run = run_loop(Pair, values)
    assert run.list_skipped()
    assert run.records["scale"].tolist() == scale_as_described(
        run.records, run.recipe.config.scaler
    )


@pytest.mark.slow
def test_patience_survives_a_resume(run_loop, tmp_path):
    """A run resumed between two skips lowers its scale at the same step."""
    values = {
        "scaler": {"hysteresis": 4, "tolerance": 0.02},
        "training": {"steps": 60},
        "checkpoints": {"every_steps": 3},
    }
    straight = run_loop(Digits, values, folder=tmp_path)
    assert {1, 2, 3, 4} <= set(straight.list_skipped())
    resumed = run_loop(Digits, values, resume=tmp_path / "step-00000003.pt")
    assert resumed.records["scale"].tolist() == straight.records["scale"][3:].tolist()
    assert_same_bits(resumed.weights(), straight.weights())


@looped(
    "settings, message",
    [
        ({"floor": 8.0, "init_scale": 4.0}, "init_scale is 4, not between floor 8 and ceiling"),
        ({"ceiling": 8.0, "init_scale": 16.0}, "init_scale is 16, not between floor 0 and ceili"),
        (
            {"floor": 100.0, "ceiling": 3.0},
            "floor is 100 and ceiling is 3; floor must not",
        ),
        ({"stop_at_floor": True}, "stop_at_floor is on, but floor is empty"),
        ({"init_scale": 1e-46}, "init_scale is 1e-46: allowed: at least 1.17549435"),
        ({"floor": 1e-40}, "floor is 1e-40: allowed: at least 1.17549435"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    """Conflicting settings are both named; a scale that is 0 in fp32, or whose reciprocal is
    infinite, is rejected.
    """
    with pytest.raises(ConfigError, match=message):
        parse_config(Regression, {"scaler": settings})


@pytest.mark.slow
def test_a_run_that_only_skips_is_stopped(run_loop):
    """After several skips in a row a calibrated run fails with the figures; the first five skips
    of Digits do not count.
    """
    with pytest.raises(ScaleUnusableError, match="step 44 was skipped, the last of 4 in a"):
        run_loop(Overflowing, {"scaler": {"stop_after_skips": 4}})
    run = run_loop(Digits, {"scaler": {"stop_after_skips": 4}})
    assert run.list_skipped()[:5] == [1, 2, 3, 4, 5]
    assert run.outcome.status == "finished"


def test_a_skip_at_the_floor_can_stop_a_run(run_loop):
    """A skip at the floor can stop a run, with a reason that has step, scale and setting."""
    settings = {"floor": 16.0, "stop_at_floor": True}
    with pytest.raises(
        ScaleUnusableError, match=r"step 43 was skipped although the loss scale, 2\^4"
    ):
        run_loop(Overflowing, {"scaler": settings})


def test_calibration_is_over_once_and_for_all():
    """Skips after calibration count for the stop rule, although no step is applied between them."""
    records = np.zeros(CALIBRATED_AFTER + 6, STEP_DTYPE)
    records["step"] = np.arange(1, len(records) + 1)
    records["flags"][-6:] = 1
    for first in (0, 1):  # with one applied step too few it is not over
        rule = StopRule(Scaler(stop_after_skips=3))
        rule.receive(records[first:])
        if first:
            rule.check()
        else:
            with pytest.raises(ScaleUnusableError, match="the last of 3 in a row"):
                rule.check()


@pytest.mark.slow
def test_the_stop_rule_survives_a_resume(run_loop, tmp_path):
    """A run resumed between two skips is stopped at the same step.

    Catches a rule that counts skips from 0 again, or takes the steps after a resume for
    calibration.
    """
    values = {"scaler": {"stop_after_skips": 4}, "checkpoints": {"every_steps": 1}}
    stopped_at = "step 44 was skipped, the last of 4 in a"
    with pytest.raises(ScaleUnusableError, match=stopped_at):
        run_loop(Overflowing, values, folder=tmp_path)

    class Resumed(Overflowing):
        finite_batches = 0

    with pytest.raises(ScaleUnusableError, match=stopped_at):
        run_loop(Resumed, values, resume=tmp_path / "step-00000042.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "unscaled", [{"precision": "bf16"}, {"precision": "fp32"}, {"scaler": {"enabled": False}}]
)
def test_a_fork_from_an_unscaled_run_has_its_scale_still_to_find(run_loop, tmp_path, unscaled):
    """A fork of an unscaled run may skip while it calibrates, without replays.

    Catches steps without a scaler, which never skip, counted as calibration, and the parent's
    patience.
    """
    run_loop(Digits, unscaled | {"training": {"steps": 30}}, folder=tmp_path / "parent")
    scaler = {"stop_after_skips": 4, "hysteresis": 2}
    fork = run_loop(
        Digits,
        {"precision": "fp16", "scaler": scaler, "training": {"steps": 40}},
        folder=tmp_path / "fork",
        resume=tmp_path / "parent" / "step-00000030.pt",
    )
    assert fork.list_skipped()[:5] == [31, 32, 33, 34, 35]
    assert fork.records["scale"][:4].tolist() == [2.0**24, 2.0**24, 2.0**23, 2.0**22]
    assert not fork.of("replay")


@pytest.mark.parametrize(
    ("wanted", "scale"), [(512.0, 512.0), (1024, 1024.0), (1.0, 4.0), (2.0**20, 2.0**14)]
)
def test_the_scale_can_be_set_while_a_run_runs(run_loop, wanted, scale):
    """A scale set by hand applies from the next step on, within the bounds, with its own event.

    Catches an int, which `GradScaler.update` rejects, and a set scale reported as a growth.
    """
    asked = []

    def control():
        asked.append(1)
        return Control(request=Request(9, "scale", wanted)) if len(asked) == 5 else Control()

    values = {
        "training": {"steps": 10},
        "scaler": {"init_scale": 64.0, "floor": 4.0, "ceiling": 2.0**14},
    }
    run = run_loop(Digits, values, control=control)
    assert run.records["scale"].tolist() == [64.0] * 5 + [scale] * 5
    [event] = run.of("scaler")
    assert run.of("obeyed") == [{"event": "obeyed", "step": 5, "request": 9}]
    assert (event["kind"], event["step"]) == ("set", 6)
    assert (event["scale_before"], event["scale_after"]) == (64.0, scale)


def test_a_scale_set_as_a_run_pauses_is_in_its_checkpoint(run_loop, tmp_path):
    """A scale acknowledged while the run pauses is in its checkpoint; a fork does not report it."""
    values = {"scaler": {"init_scale": 64.1}, "training": {"steps": 2}}
    run = run_loop(
        Digits,
        values,
        folder=tmp_path / "parent",
        control=lambda: Control("pause", Request(3, "scale", 32.1)),
    )
    assert [event["request"] for event in run.of("obeyed")] == [3]
    path = tmp_path / "parent" / "step-00000001.pt"
    assert checkpoint.load(path)["scaler"]["scale"] == np.float32(32.1)

    fork = run_loop(Digits, values, folder=tmp_path / "fork", resume=path)
    assert not fork.of("scaler", kind="set")
    resumed = run_loop(Digits, values, folder=tmp_path / "parent", resume=path)
    [event] = resumed.of("scaler", kind="set")
    scales = np.float32([event["scale_before"], event["scale_after"]])
    assert (event["step"], scales.tolist()) == (2, np.float32([64.1, 32.1]).tolist())


def test_a_resumed_run_reports_no_scale_set_by_hand(run_loop, tmp_path):
    """A resumed run reports no scale set by hand after a back-off at the last step, or for an older
    checkpoint. A scale that is rounded, or not the one after the last step, would be detected.
    """
    values = {"scaler": {"init_scale": 2.0**24 / 3}, "training": {"steps": 3}}
    stop = iter([Control(), Control("pause")])
    run = run_loop(Digits, values, folder=tmp_path, control=lambda: next(stop))
    assert run.list_skipped() == [1, 2]
    path = tmp_path / "step-00000002.pt"
    assert not run_loop(Digits, values, folder=tmp_path, resume=path).of("scaler", kind="set")
    state = torch.load(path, weights_only=True)  # not mapped: it is written again
    del state["parts"]["telemetry"]
    torch.save(state, path)
    assert not run_loop(Digits, values, folder=tmp_path, resume=path).of("scaler", kind="set")


@pytest.mark.parametrize("nonsense", [-1.0, 0.0, 1e-40, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_not_set(run_loop, nonsense):
    """An invalid scale is ignored, and the run keeps its scale."""
    run = run_loop(
        Digits,
        {"training": {"steps": 4}, "scaler": {"init_scale": 64.0}},
        control=lambda: Control(request=Request(1, "scale", nonsense)),
    )
    assert set(run.records["scale"]) == {64.0}


@pytest.mark.slow
def test_a_skipped_batch_can_be_retried_in_fp32(run_loop, tmp_path):
    """A retry in fp32 moves the weights by the true gradient, and has an event and a count."""
    values = {"training": {"steps": 42}, "scaler": {"retry_in_fp32": True}}
    run = run_loop(Overflowing, values, folder=tmp_path)
    assert run.list_skipped() == [41, 42]
    retries = run.of("retry")
    assert [(event["step"], event["applied"]) for event in retries] == [(41, True), (42, True)]
    assert all(0 < event["grad_norm"] < 100 for event in retries)
    assert retries[0]["loss"] != retries[1]["loss"]
    progress = checkpoint.load(tmp_path / "step-00000042.pt")["progress"]
    assert (progress["skipped"], progress["retried"], progress["applied"]) == (2, 2, 42)
    plain = run_loop(Overflowing, {"training": {"steps": 42}})
    assert not torch.equal(run.weights()["model.0.weight"], plain.weights()["model.0.weight"])


def test_a_retry_that_is_not_finite_either_changes_nothing(run_loop):
    """A retry in fp32 that gives NaN is skipped, with an event."""

    class Broken(Regression):
        def training_step(self, batch):
            for loss in super().training_step(batch):
                yield Loss(loss.value * float("nan"), loss.optimizer)

    values = {"precision": "fp16", "training": {"steps": 2}, "scaler": {"retry_in_fp32": True}}
    run = run_loop(Broken, values)
    assert [event["applied"] for event in run.of("retry")] == [False, False]
    assert all(weight.isfinite().all() for weight in run.weights().values())


class InfiniteAtFirst(Regression):
    """A recipe with a dozen losses that are infinite in every precision, then finite ones."""

    defaults = {  # noqa: RUF012
        "training": {"steps": 60, "batch_size": 8},
        "scaler": {"init_scale": 2.0**-120},
    }
    batches = 0

    def training_step(self, batch):
        self.batches += 1
        [loss] = super().training_step(batch)
        yield Loss(loss.value / (0 if self.batches <= 40 else 1), "sgd")


@pytest.mark.parametrize("fused", [True, False])
def test_a_scale_that_falls_without_end_spares_the_weights(run_loop, fused):
    """The scale stops falling while its reciprocal is finite; torch's reaches 0, and makes all
    weights NaN.
    """
    # A replay would draw batches, too.
    values = {"training": {"fused": fused}, "diagnosis": {"replay_skips": 0}}
    run = run_loop(InfiniteAtFirst, values)
    assert run.list_skipped() == list(range(1, 41))
    assert run.records["scale"].min() >= 2.0**-126
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())
