"""Headroom in our own training loop: activations and gradients against fp16's limits."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from halfstep.watching.headroom import Headroom as Measuring
from tests.marks import looped
from tests.trainer.conftest import Pair, Regression, assert_same_bits
from trainer.diagnosis.step_repetition import StepRepetition
from trainer.recipes.digits import Digits

pytestmark = pytest.mark.usefixtures("nothing_compiled")

EVERY = {"diagnosis": {"headroom_every_steps": 3, "histogram_every_steps": 0}}


class Loud(Regression):
    """A recipe that records its first layer's largest output in each step by its own hook."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.seen = []
        first = self.modules["model"][0]
        first.register_forward_hook(lambda *call: self.seen.append(call[2].detach().float()))


def test_the_largest_and_smallest_of_each_module_in_steps_that_are_due(run_loop):
    """Due steps have each innermost module's largest and smallest values, over all
    micro-batches.
    """
    values = EVERY | {"precision": "fp16", "training": {"steps": 7, "accumulation_steps": 2}}
    values |= {"scaler": {"init_scale": 256.0}}
    run = run_loop(Loud, values)
    events = run.of("headroom")
    assert [each["step"] for each in events] == [3, 6]
    for event in events:
        assert event["scale"] == 256.0
        names = [each["name"] for each in event["modules"]]
        assert names == ["model.0", "model.1", "model.2"]
        first = event["modules"][0]
        seen = torch.cat(run.recipe.seen[2 * event["step"] - 2 : 2 * event["step"]]).abs()
        assert first["activation"] == seen.max().item()
        assert first["smallest_activation"] == seen[seen > 0].min().item()
        assert first["dtype"] == "float16"
        assert 0 < first["smallest_gradient"] < first["gradient"]


def measure(network, *passes):
    """Return the measured values of a forward and backward pass, by name."""
    measuring = Measuring(with_smallest=True)
    measuring.begin({each: name for name, each in network.named_modules()})
    try:
        for inputs in passes:
            network(inputs).sum().backward()
    finally:
        measuring.end()
    modules, found = measuring.read()
    return {each.name: found[:, :, i].tolist() for i, each in enumerate(modules)}


def test_zeros_are_no_smallest_numbers():
    """Zeros do not count as smallest values, and a module with only zeros has none."""
    network = nn.Sequential(nn.Identity(), nn.ReLU())
    inputs = torch.tensor([[-3.0, 2.0**-30, 5.0]], requires_grad=True)
    assert measure(network, inputs)["1"] == [[5.0, 2.0**-30], [1.0, 1.0]]
    nothing = torch.zeros(1, 3, requires_grad=True)
    assert measure(network, nothing)["1"][0] == [0.0, torch.inf]
    assert measure(network, nothing, inputs, nothing)["1"][0] == [5.0, 2.0**-30]


@looped("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_magnitudes_are_exact_in_every_type(dtype):
    """Magnitudes are computed from the bits: subnormals, both zeros and infinities, with NaN
    above all.
    """
    tiny = torch.finfo(dtype).smallest_normal / 2
    for values, largest, smallest in (
        ([-0.0, 0.0, -tiny, 1.5], 1.5, tiny),
        ([-7.0, 3.0], 7.0, 3.0),
        ([-torch.inf, 3.0], torch.inf, 3.0),
    ):
        inputs = torch.tensor([values], dtype=dtype, requires_grad=True)
        expected = torch.tensor([largest, smallest], dtype=dtype).float().tolist()
        assert measure(nn.Identity(), inputs)[""][0] == expected
    inputs = torch.tensor([[float("nan"), torch.inf, -2.0]], dtype=dtype, requires_grad=True)
    [largest, smallest] = measure(nn.Identity(), inputs)[""][0]
    assert largest != largest
    assert smallest == 2.0


@pytest.mark.parametrize("recipe_class", [Pair, Digits])
def test_no_bit_of_training_is_different(run_loop, recipe_class):
    """Headroom at every step or none gives the same bits, with skips and replays."""
    values = {"training": {"steps": 30}, "modules": {"checkpointed": ["model.0"]}}
    if recipe_class is Pair:
        values["scaler"] = {"init_scale": 2.0**20, "growth_interval": 5}
    runs = [
        run_loop(recipe_class, values | {"diagnosis": {"headroom_every_steps": every}})
        for every in (0, 1)
    ]
    assert [len(run.of("headroom")) for run in runs] == [0, 30]
    assert_same_bits(runs[0].weights(), runs[1].weights())
    assert runs[0].records["loss"].tolist() == runs[1].records["loss"].tolist()
    assert runs[0].list_skipped() == runs[1].list_skipped()
    assert not torch_module._global_forward_hooks


def test_a_replay_is_not_measured(run_loop, monkeypatch):
    """A measured step in which another one is replayed has the numbers of an undisturbed one."""

    def values(skips):
        diagnosis = {"headroom_every_steps": 1, "replay_skips": skips}
        return {"training": {"steps": 60}, "diagnosis": diagnosis}

    def loudly(self, trace, *arguments):
        self._modules["model"](torch.full((1, 64), 1e4))
        return original(self, trace, *arguments)

    original = StepRepetition._repeat_passes
    monkeypatch.setattr(StepRepetition, "_repeat_passes", loudly)
    replayed = run_loop(Digits, values(1))
    assert len(replayed.of("replay")) == 1
    alone = run_loop(Digits, values(0))
    assert repr(replayed.of("headroom")) == repr(alone.of("headroom"))  # NaN is what it was


def test_a_compiled_network_is_not_changed(run_loop, monkeypatch, capsys):
    """A compiled network is not measured, and one sentence in the log says so."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)  # what it makes is not used
    values = EVERY | {"training": {"steps": 7, "compile": True}}
    run = run_loop(Regression, values)
    assert run.of("headroom") == run.of("failed_diagnosis") == []
    assert capsys.readouterr().err.count("headroom is not measured. Modules are compiled: ") == 1


def test_none_is_taken_when_it_is_switched_off(run_loop):
    """An interval of 0 disables headroom measurements."""
    values = {"diagnosis": {"headroom_every_steps": 0}, "training": {"steps": 3}}
    assert run_loop(Regression, values).of("headroom") == []
