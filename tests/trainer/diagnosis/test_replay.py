from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from halfstep.recording import ring
from halfstep.telemetry.plain_json import json_safe
from halfstep.watching.async_host_copy import HostCopy
from tests.marks import extended
from tests.trainer.conftest import Pair, Regression, assert_same_bits, bare_loop
from tests.trainer.diagnosis.replay_made import (
    Planted,
    PlantedBackward,
    _factor,
)
from trainer.data.batches import fingerprint
from trainer.data.sampler import Sampler
from trainer.data.sources import make_sources
from trainer.diagnosis.replay import Replay
from trainer.diagnosis.step_repetition import StepRepetition
from trainer.distributed.ranks import Control, Request
from trainer.precision.scale_policies import CALIBRATED_AFTER
from trainer.recipes.digits import Digits
from trainer.recipes.erfnet import ERFNet
from trainer.recipes.gpt import GPT

pytestmark = pytest.mark.slow


class ForwardPlant(nn.Module):
    """A module that multiplies large activations by 60,000, and divides them again."""

    def forward(self, x):
        x = x.half()
        return x * _factor(x) / _factor(x)


class PlantedForward(Planted):
    plant: ClassVar = ForwardPlant


@pytest.mark.parametrize(
    ("recipe", "direction", "operation"),
    [(PlantedForward, "forward", "mul"), (PlantedBackward, "backward", "MulBackward0")],
)
def test_a_planted_overflow_is_named_exactly(run_loop, recipe, direction, operation):
    """The replay names the planted module, direction and operation, although others become inf
    later.

    Catches a search that blames the last module, or the one with the overflowed parameters: the
    plant has none.
    """
    run = run_loop(recipe)
    replays = run.of("replay")
    assert 1 <= len(replays) <= 3
    for event in replays:
        assert event["step"] in run.list_skipped()
        assert event["exact"], event["notes"]
        assert not event["requested"]
        assert (event["module"], event["direction"]) == ("model.0.2", direction)
        assert event["operation"] == operation
        assert (event["dtype"], event["limit"]) == ("float16", 65504.0)
        assert event["defect"]["value"] > 65504
        assert event["scale"] == run.records["scale"][event["step"] - 1]
        [skip] = run.of("scaler", kind="skip", step=event["step"])
        assert event["loss_nonfinite"] == skip["loss_nonfinite"] == (direction == "forward")


@pytest.mark.parametrize("recipe", [PlantedForward, PlantedBackward])
def test_the_run_after_a_replay_is_bit_identical(run_loop, recipe):
    """A run with replays is bit-identical to one without, with every record and statistic.

    Catches a replay that moves a generator (dropout), a buffer (BatchNorm) or a gradient.
    """
    values = {"training": {"steps": 160, "accumulation_steps": 1}}
    with_it = run_loop(recipe, values | {"diagnosis": {"replay_skips": 3}})
    without = run_loop(recipe, values | {"diagnosis": {"replay_skips": 0}})
    assert with_it.of("replay")
    assert not without.of("replay")
    assert_same_bits(with_it.weights(), without.weights())
    assert_same_bits(with_it.recipe.scaler.state_dict(), without.recipe.scaler.state_dict())
    for name in ("loss", "scale", "grad_norm", "flags"):
        assert with_it.records[name].tobytes() == without.records[name].tobytes()


CALIBRATED_STEP, PLANTED_STEP = 25, 27


def overflow_forward(forward, x):
    """A layer with an output beyond fp16's maximum in this batch."""
    return forward(x).half() * 2.0**15 * 2.0**15


def overflow_backward(forward, x):
    """A layer with unchanged output and a gradient multiplied by 2^40."""
    y = forward(x).half()
    return y + (y - y.detach()) * 2.0**20 * 2.0**20


def with_plant(recipe_class, path, plant):
    """The recipe with a module that overflows for the batch of PLANTED_STEP."""

    class WithPlant(recipe_class):
        def __init__(self, config, device):
            super().__init__(config, device)
            sampler = Sampler(self.train_size, config.training)
            _source, again = make_sources(self, sampler, config, device, on_wait=None)
            [start] = sampler.starts_in((PLANTED_STEP - 1) * sampler.examples_in_a_step)
            self.planted = fingerprint(again.take(start))
            self.is_planted = False
            module = self.modules["model"].get_submodule(path)
            sound = module.forward
            module.forward = lambda x: plant(sound, x) if self.is_planted else sound(x)

        def training_step(self, batch):
            self.is_planted = fingerprint(batch) == self.planted
            yield from super().training_step(batch)

    return WithPlant


TINY_GPT = {"layers": 2, "width": 16, "heads": 2, "context": 8, "max_bytes": 2**15, "dropout": 0.1}
TINY_STREETS = {"height": 16, "width": 32, "channels": 4, "blocks": 1, "dilations": 0}


@pytest.mark.parametrize(
    ("recipe", "sizes", "path", "plant", "direction", "operation"),
    [
        (GPT, TINY_GPT, "blocks.1.attention", overflow_backward, "backward", "MulBackward0"),
        *extended(
            [
                (GPT, TINY_GPT, "blocks.0.mlp_output", overflow_forward, "forward", "mul"),
                (ERFNet, TINY_STREETS, "encoder.2.column_2", overflow_forward, "forward", "mul"),
            ]
        ),
    ],
)
def test_an_overflow_in_a_real_recipe_is_named_and_leaves_no_trace(
    run_loop, recipe, sizes, path, plant, direction, operation
):
    """The module of a transformer or a convolutional network that overflows in one step is named,
    and the run is the same as without replay: weights, running statistics, optimizer, scaler,
    records and events. Catches a search that blames a residual branch for its neighbour, or the
    overflowed parameters, which here are all upstream; and a replay that affects dropout or
    BatchNorm."""
    values = {
        "training": {"steps": 31, "batch_size": 4},
        "scaler": {"init_scale": 1024.0},
        "evaluation": {"every_steps": None},
        "checkpoints": {"every_steps": CALIBRATED_STEP},  # when the host receives all steps
        "recipe": sizes,
    }
    class_ = with_plant(recipe, path, plant)
    run = run_loop(class_, values | {"diagnosis": {"replay_skips": 3}})
    assert run.list_skipped() == [PLANTED_STEP]
    [event] = run.of("replay")
    assert (event["step"], event["exact"], event["notes"]) == (PLANTED_STEP, True, [])
    assert (event["module"], event["direction"]) == (f"model.{path}", direction)
    assert event["operation"] == operation
    assert (event["dtype"], event["limit"]) == ("float16", 65504.0)
    assert event["defect"]["value"] > 65504
    assert event["loss_nonfinite"] == (direction == "forward")

    without = run_loop(class_, values | {"diagnosis": {"replay_skips": 0}})
    assert_same_bits(run.weights(), without.weights())
    for left, right in zip(_optimizers(run), _optimizers(without), strict=True):
        assert_same_bits(left, right)
    assert_same_bits(run.recipe.scaler.state_dict(), without.recipe.scaler.state_dict())
    for name in set(run.records.dtype.names) - {"elapsed_ms", "step_us", "data_us"}:
        assert run.records[name].tobytes() == without.records[name].tobytes()
    assert _told(run) == _told(without)


def _told(run):
    """Return a run's events except replays and measured times."""
    kept = [e for e in json_safe(run.events) if e["event"] != "replay"]
    kept = [e for e in kept if not e.get("name", "").startswith("run/")]
    return [{key: e[key] for key in e if key != "elapsed_ms"} for e in kept]


@pytest.mark.parametrize("fused", [True, *extended([False])])
def test_telemetry_histogram_and_replay_together_change_no_bit(run_loop, fused):
    """With telemetry, histogram and replay in every step digits ends as in PyTorch's documented
    loop. A change of the weights, their gradients or dropout's generator would be detected.
    """
    values = {
        "training": {"steps": 130, "fused": fused},
        "recipe": {"dropout": 0.1},
        "diagnosis": {"histogram_every_steps": 1, "replay_skips": 1000},
    }
    run, bare = run_loop(Digits, values), bare_loop(Digits, values)
    assert run.of("replay")
    assert len(run.of("histogram")) == 130
    assert_same_bits(run.weights(), bare.weights())
    for left, right in zip(_optimizers(run), _optimizers(bare), strict=True):
        assert_same_bits(left, right)
    assert_same_bits(run.recipe.scaler.state_dict(), bare.recipe.scaler.state_dict())


def _optimizers(run):
    return [optimizer.state_dict() for optimizer in run.recipe.optimizers.values()]


def test_a_replayed_loss_is_that_of_the_skipped_step(run_loop, monkeypatch):
    """A replay with the skipped step's examples, random numbers and weights has its loss."""
    losses = []
    original = StepRepetition._repeat_passes

    def keeping(self, *args):
        losses.append(original(self, *args))
        return losses[-1]

    monkeypatch.setattr(StepRepetition, "_repeat_passes", keeping)
    values = {"training": {"steps": 130}, "recipe": {"dropout": 0.3, "shift_pixels": 2}}
    run = run_loop(Digits, values)
    steps = [event["step"] for event in run.of("replay")]
    assert len(steps) == 3
    assert [float(loss) for loss, _gradients in losses] == run.records["loss"][
        [s - 1 for s in steps]
    ].tolist()


def test_only_the_first_skips_are_replayed(run_loop):
    """No skip after the configured number of replays is observed."""
    run = run_loop(Digits, {"training": {"steps": 100}, "diagnosis": {"replay_skips": 1}})
    [replayed] = (event["step"] for event in run.of("replay"))
    assert any(step > replayed for step in run.list_skipped())


@pytest.mark.parametrize("knows", [True, *extended([False])])
def test_a_resumed_run_replays_what_the_undisturbed_one_would(run_loop, tmp_path, knows):
    """A resumed run continues the calibration and the count of replays; an older checkpoint without
    this state loads too. Catches a resumed run that calibrates again, and one that counts replays
    from 0.
    """
    values = {
        "training": {"steps": 140},
        "scaler": {"init_scale": 2.0**20},
        "checkpoints": {"every_steps": 1},
        "diagnosis": {"replay_skips": 2},
    }
    straight = run_loop(Digits, values, folder=tmp_path)
    first, second = (event["step"] for event in straight.of("replay"))
    assert len([step for step in straight.list_skipped() if step > second]) > 0
    path = tmp_path / f"step-{first:08d}.pt"
    if not knows:
        state = torch.load(path, weights_only=True)
        del state["parts"]["replay"], state["parts"]["stop_rule"]
        torch.save(state, path)
    resumed = run_loop(Digits, values, resume=path)
    assert_same_bits(resumed.weights(), straight.weights())
    if knows:
        assert [event["step"] for event in resumed.of("replay")] == [second]


def test_a_fork_replays_as_many_skips_as_any_run(run_loop, tmp_path):
    """A fork replays as many skips as any run, without counting its parent's."""
    values = {"training": {"steps": 60}, "diagnosis": {"replay_skips": 1}}
    parent = run_loop(Digits, values, folder=tmp_path / "parent")
    assert len(parent.of("replay")) == 1
    fork = run_loop(
        Digits,
        values | {"training": {"steps": 90}},
        folder=tmp_path / "fork",
        resume=tmp_path / "parent" / "step-00000060.pt",
    )
    assert [event["step"] for event in fork.of("replay")] == fork.list_skipped()[:1]


def test_a_step_to_come_is_replayed_on_request(run_loop):
    """A requested future step is replayed after its attempt, with a note that it was not
    skipped.
    """
    controls = iter([Control(request=Request(id_, "replay", 12.0)) for id_ in (3, 4)])
    run = run_loop(
        Digits,
        {"training": {"steps": 20}, "scaler": {"init_scale": 8.0}},
        control=lambda: next(controls, Control()),
    )
    [event] = run.of("replay")
    assert (event["step"], event["requested"], event["found"]) == (12, True, False)
    assert event["notes"] == ["the step was not skipped: the weights are those after it"]
    assert [each["request"] for each in run.of("obeyed")] == [3, 4]


def test_a_past_skip_is_replayed_on_request(run_loop):
    """A request for a past skip replays it at its scale with current weights, noted as inexact."""
    calls = []

    def control():
        calls.append(1)
        is_asked = len(calls) in (80, 90)
        return Control(request=Request(len(calls), "replay", 1.0)) if is_asked else Control()

    run = run_loop(
        Digits, {"training": {"steps": 100}, "diagnosis": {"replay_skips": 0}}, control=control
    )
    for event, now in zip(run.of("replay"), (80, 90), strict=True):
        assert (event["step"], event["exact"], event["scale"]) == (1, False, 2.0**24)
        assert event["found"]
        assert f"the weights are those after step {now}" in event["notes"]
    assert [(each["step"], each["request"]) for each in run.of("obeyed")] == [(80, 80), (90, 90)]


def test_a_skip_of_one_optimizer_among_two_is_not_called_exact(run_loop):
    """A skip of one of two optimizers is not exact, since the other has changed its weights."""
    run = run_loop(
        Pair,
        {"training": {"steps": 200}, "scaler": {"growth_interval": 30, "init_scale": 2.0**16}},
    )
    for event in run.of("replay"):
        flags = run.records["flags"][event["step"] - 1] >> 8
        assert event["exact"] == (flags == 3)
    assert run.of("replay")


def test_a_mask_of_minus_infinity_is_no_overflow(run_loop):
    """Attention's mask of -inf is no overflow: it is an argument, and later infinities follow."""

    class Masked(PlantedForward):
        def training_step(self, batch):
            inputs, targets = batch
            scores = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
            scores = scores + torch.ones(3, 3)  # is given the inf, and passes it on
            assert torch.softmax(scores, dim=1).isfinite().all()
            yield Loss(F.mse_loss(self.modules["model"](inputs), targets), "sgd")

    [event, *_] = run_loop(Masked).of("replay")
    assert event["module"] == "model.0.2"


def test_an_overflow_outside_of_modules_is_the_training_steps(run_loop):
    """An overflow of the loss itself is attributed to the training step and not to a module."""

    class Outside(Planted):
        def training_step(self, batch):
            inputs, targets = batch
            output = self.modules["model"](inputs)
            far = inputs.abs().amax().half() * 300  # inf with the far example
            yield Loss(F.mse_loss(output, targets) * far / 300, "sgd")

    [event, *_] = run_loop(Outside).of("replay")
    assert (event["module"], event["direction"]) == ("training_step", "forward")
    assert event["operation"] == "mul"


def test_a_replay_that_fails_midway_leaves_no_trace(run_loop, monkeypatch):
    """Any error of a replay restores generators, buffers and the sampler."""
    alone = run_loop(PlantedForward)

    def failing(*_arguments):
        torch.rand(3)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(StepRepetition, "_repeat_passes", failing)
    run = run_loop(PlantedForward)
    assert [result["diagnosis"] for result in run.of("failed_diagnosis")] == ["replay"]
    assert alone.of("replay")
    assert_same_bits(run.weights(), alone.weights())


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_which_skips_are_replayed_depends_on_steps_alone(run_loop, monkeypatch, seconds):
    """Which skips are replayed does not depend on when their flags arrive at the host."""
    monkeypatch.setattr(ring, "DRAIN_SECONDS", seconds)
    run = run_loop(PlantedForward)
    skips = [event["step"] for event in run.of("scaler", kind="skip")]
    calibrated = [step for step in skips if step > CALIBRATED_AFTER]
    assert [event["step"] for event in run.of("replay")] == calibrated[:3]
    assert calibrated


class Averaged(PlantedForward):
    """A recipe with code after the yield: a moving average, and a saved count."""

    name: ClassVar = "averaged"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["average"] = torch.optim.swa_utils.AveragedModel(self.modules["model"])
        self.calls = 0

    def training_step(self, batch):
        self.calls += 1
        yield from super().training_step(batch)
        self.modules["average"].update_parameters(self.modules["model"])

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_replay_runs_nothing_after_the_last_loss(run_loop):
    """Code after a step's last loss does not run in a replay, such as an average of weights."""
    run = run_loop(Averaged)
    alone = run_loop(Averaged, {"diagnosis": {"replay_skips": 0}})
    assert run.of("replay")
    assert_same_bits(run.weights(), alone.weights())
    assert run.recipe.calls == alone.recipe.calls == 150


class Clipped(Pair):
    """A recipe that changes weights between two losses, like the first WGAN."""

    name: ClassVar = "clipped"
    defaults: ClassVar = {"precision": "fp16", "training": {"steps": 120, "batch_size": 8}}

    def training_step(self, batch):
        losses = super().training_step(batch)
        yield next(losses)
        with torch.no_grad():
            for weight in self.modules["second"].parameters():
                weight.mul_(0.99)
        yield next(losses)


def test_a_replay_puts_back_weights_that_change_between_losses(run_loop):
    """Weights that a step changes between two losses are restored after a replay."""
    values = {"scaler": {"init_scale": 2.0**14, "growth_interval": 27}}
    run = run_loop(Clipped, values)
    alone = run_loop(Clipped, values | {"diagnosis": {"replay_skips": 0}})
    assert run.of("replay")
    assert_same_bits(run.weights(), alone.weights())


def test_replay_watches_for_a_bounded_time(run_loop, monkeypatch):
    """A healthy run is watched for a number of steps after calibration, at no cost afterwards."""
    kept = []
    original = Replay.before_step

    def seen(self, step):
        original(self, step)
        kept.append(self._coming is not None)

    monkeypatch.setattr(Replay, "before_step", seen)
    monkeypatch.setattr("trainer.diagnosis.skip_history.WATCHED_STEPS", 20)
    run_loop(Planted, {"diagnosis": {"replay_skips": 3}})
    assert sum(kept) == 20 + 1
    assert not any(kept[:CALIBRATED_AFTER])
    assert not any(kept[CALIBRATED_AFTER + 21 :])


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_replay_counts_what_the_step_counted(run_loop, accumulation_steps):
    """A replay has the step's own culprits; on a GPU only the replay has counts."""
    training = {"steps": 150, "batch_size": 8, "accumulation_steps": accumulation_steps}
    run = run_loop(PlantedBackward, {"training": training})
    skips = {event["step"]: event["culprits"] for event in run.of("scaler", kind="skip")}
    assert run.of("replay", exact=True)
    for replay in run.of("replay", exact=True):
        assert replay["culprits"] == [{"optimizer": "sgd", **c} for c in skips[replay["step"]]]


def test_a_replay_by_hand_that_fails_ends_no_run(run_loop, monkeypatch):
    """A failing requested replay is reported and acknowledged, and the run's bits are unchanged."""
    alone = run_loop(PlantedForward, {"diagnosis": {"replay_skips": 0}})

    def failing(*_arguments):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(StepRepetition, "_repeat_passes", failing)
    wanted = iter([Control()] * 5 + [Control(request=Request(7, "replay", 3.0))])
    values = {"diagnosis": {"replay_skips": 0}}
    run = run_loop(PlantedForward, values, control=lambda: next(wanted, Control()))
    [result] = run.of("failed_diagnosis")
    assert result["diagnosis"] == "replay"
    assert [event["request"] for event in run.of("obeyed")] == [7]
    assert_same_bits(run.weights(), alone.weights())


class Gaps(Regression):
    """A recipe with a NaN in one example, which makes the loss NaN and no gradient."""

    name: ClassVar = "gaps"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.inputs[41, 2] = torch.nan

    def batch(self, indices, generator):
        inputs, targets = super().batch(indices, generator)
        return {"inputs": inputs, "targets": targets + 0.1 * torch.rand(targets.shape)}

    def training_step(self, batch):
        outputs = self.modules["model"](batch["inputs"].nan_to_num())
        shown = (0 * batch["inputs"]).sum()
        yield Loss(F.mse_loss(outputs, batch["targets"]) + shown, "sgd")


class GapsByDesign(Regression):
    """A recipe with missing targets in each batch that its loss leaves out, and that diverges."""

    name: ClassVar = "gaps_by_design"

    def __init__(self, config, device):
        super().__init__(config, device)
        self.targets[::2] = torch.nan

    def training_step(self, batch):
        inputs, targets = batch
        outputs = self.modules["model"](inputs)
        apart = torch.where(targets.isnan(), 0.0, outputs - targets.nan_to_num())
        yield Loss((1e15 * apart).square().mean(), "sgd")


@pytest.mark.parametrize("accumulation_steps", [2, *extended([1])])
def test_a_batch_that_is_not_finite_is_named_without_a_scaler(
    run_loop, monkeypatch, accumulation_steps
):
    """Without a scaler a non-finite batch of the first lost step is drawn again and named."""
    values = {"training": {"steps": 300, "accumulation_steps": accumulation_steps}}
    run = run_loop(Gaps, values)
    lost = run.records["step"][~np.isfinite(run.records["loss"])]
    [event] = run.of("bad_inputs")
    assert event["step"] == lost[0]
    assert event["inputs"] == [{"name": "batch['inputs']", "inf": 0, "nan": 1}]
    monkeypatch.setattr(Replay, "_check_batch", lambda *_: None)
    unasked = run_loop(Gaps, values)
    assert run.records["loss"].tobytes() == unasked.records["loss"].tobytes()
    weights, others = (each.recipe.modules["model"].state_dict() for each in (run, unasked))
    assert_same_bits(weights, others)


def test_values_nonfinite_by_design_are_no_cause(run_loop):
    """A NaN that the previous batch, with a finite loss, had in the same position is no cause."""
    run = run_loop(GapsByDesign, {"training": {"steps": 120}})
    assert not torch.tensor(run.records["loss"]).isfinite().all()
    assert run.of("bad_inputs") == []


class Late:
    """Flags that arrive some steps late, and a list of the steps in which the host waited."""

    def __init__(self, monkeypatch, steps):
        self.waits, self.now = [], 0
        sent = WeakKeyDictionary()
        before_step, init, wait = Replay.before_step, HostCopy.__init__, HostCopy.wait

        def begins(replay, step):
            self.now = step
            before_step(replay, step)

        def sends(copy, *arguments):
            init(copy, *arguments)
            sent[copy] = self.now

        def waits(copy):
            if not has_arrived(copy):
                self.waits.append(self.now)
                sent[copy] = -steps
            wait(copy)

        def has_arrived(copy):
            return self.now >= sent[copy] + steps

        monkeypatch.setattr(Replay, "before_step", begins)
        monkeypatch.setattr(HostCopy, "__init__", sends)
        monkeypatch.setattr(HostCopy, "has_arrived", has_arrived)
        monkeypatch.setattr(HostCopy, "wait", waits)


def test_the_host_waits_only_where_a_skip_is_likely(run_loop, monkeypatch):
    """The host waits for flags only in the step after a growth; elsewhere it polls."""
    late = Late(monkeypatch, steps=3)
    values = {"precision": "fp16", "scaler": {"init_scale": 1024.0, "growth_interval": 40}}
    run = run_loop(Regression, {"training": {"steps": 150}, **values})
    assert run.list_skipped() == []
    # Watching begins once the flags of 25 applied steps have arrived.
    assert sorted(set(late.waits)) == [42, 82, 122, 150]  # the last one at the end of the run


def test_a_skip_whose_flag_comes_late_is_replayed_with_the_current_weights(run_loop, monkeypatch):
    """A skip with a late flag is replayed with current weights, as noted; a later one is exact."""
    Late(monkeypatch, steps=3)
    run = run_loop(PlantedBackward, {"training": {"steps": 150, "batch_size": 8}})
    replays = run.of("replay")
    assert not replays[0]["exact"]
    last = replays[0]["step"] + 2
    assert replays[0]["notes"] == [f"the weights and buffers are those after step {last}"]
