"""Modules in their own precision, compared with a recipe that has the region in its code."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from halfstep.run_config import ConfigError
from tests.trainer.conftest import Regression, assert_same_bits
from tests.trainer.diagnosis.replay_made import Planted
from trainer.precision.module_precision import run_in

FP16 = {"precision": "fp16", "scaler": {"init_scale": 1024.0}}


class ByHand(Regression):
    """A recipe that runs its last layer in an autocast region of its own."""

    dtype = torch.float32

    def training_step(self, batch):
        inputs, targets = batch
        first, middle, last = self.modules["model"]._orig_mod if self.is_compiled else self.layers
        hidden = middle(first(inputs))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            output = last(hidden.to(self.dtype))
        yield Loss(F.mse_loss(output.float(), targets), "sgd")

    is_compiled = False

    @property
    def layers(self):
        return self.modules["model"]


class BySetting(Regression):
    def training_step(self, batch):
        inputs, targets = batch
        yield Loss(F.mse_loss(self.modules["model"](inputs).float(), targets), "sgd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_setting_equals_a_region_by_hand(run_loop, dtype):
    """Loss, weights and scale equal those of a hand-written region, bit for bit."""
    by_hand = run_loop(type("ByHand", (ByHand,), {"dtype": dtype}), FP16)
    field = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    run = run_loop(BySetting, FP16 | {"modules": {field: ["model.2"]}})
    plain = run_loop(BySetting, FP16)
    assert_same_bits(run.weights(), by_hand.weights())
    assert run.records["loss"].tolist() == by_hand.records["loss"].tolist()
    assert run.records["loss"].tolist() != plain.records["loss"].tolist()


class Halves(nn.Module):
    """A module that records its input dtypes, and takes and returns several tensors."""

    def forward(self, inputs, *, pair):
        self.seen = [inputs.dtype, pair["second"].dtype, pair["count"].dtype]
        return inputs, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_goes_in_is_cast_and_nothing_else(dtype):
    """Half-precision inputs are cast at any depth; integers, and networks without autocast, are
    not.
    """
    module = Halves()
    run_in(dtype, module, "cpu")
    half, count = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        output, is_on = module(half, pair={"second": half, "count": count})
    assert module.seen == [dtype, dtype, torch.int64]
    assert (output.dtype, is_on) == (dtype, dtype == torch.bfloat16)
    module(half, pair={"second": half, "count": count})
    assert module.seen == [torch.float16, torch.float16, torch.int64]


def test_fp32_holds_where_both_name_a_module(run_loop):
    """If both fp32 and bf16 name a module, fp32 applies, also within another module."""
    fp32 = run_loop(BySetting, FP16 | {"modules": {"fp32": ["model"]}})
    for bf16 in (["model"], ["model.0"]):
        both = run_loop(BySetting, FP16 | {"modules": {"fp32": ["model"], "bf16": bf16}})
        assert_same_bits(both.weights(), fp32.weights())


def test_a_tied_weight_has_a_cast_for_each_precision():
    """A tied weight has a cast for each precision, although autocast caches one per weight."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    run_in(torch.bfloat16, second, "cpu")
    with torch.autocast("cpu", torch.float16):
        assert second(first(torch.ones(1, 4))).dtype == torch.bfloat16


def test_a_copy_of_a_module_calls_itself():
    """A copy of a module uses its own weights, although the recipe may copy it at any time."""
    module = nn.Linear(2, 1)
    run_in(torch.float32, module, "cpu")
    copy = deepcopy(module)
    with torch.no_grad():
        copy.weight.zero_()
        copy.bias.zero_()
    with torch.autocast("cpu", torch.float16):
        assert copy(torch.ones(1, 2)).item() == 0 != module(torch.ones(1, 2)).item()


@pytest.mark.slow
def test_it_compiles_to_one_graph_with_the_bits_of_the_region_by_hand():
    """A network with module precisions compiles to one graph with the hand-written region's
    bits.
    """

    class Network(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.inner(x.float())

    results = []
    for wrap in (Network, lambda module: run_in(torch.float32, module, "cpu") or module):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4)), nn.Linear(4, 1))
        compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.float16):
            output = compiled(torch.ones(2, 4))
        output.sum().backward()
        results.append([output.detach(), *[weight.grad for weight in layers.parameters()]])
    assert_same_bits(*results)


@pytest.mark.slow
def test_a_compiled_run_is_controlled(run_loop, monkeypatch):
    """With training.compile modules keep their names and precisions."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    values = FP16 | {"modules": {"fp32": ["model.2"]}}
    run = run_loop(BySetting, values)
    compiled = run_loop(BySetting, values | {"training": {"compile": True}})
    assert compiled.records["loss"].tolist() == run.records["loss"].tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_it_says_nothing_new_no_bit_is_different(run_loop, precision):
    """modules.fp32 in an fp32 run, and modules.bf16 in a bf16 run, change no bit."""
    field = {"fp32": "fp32", "bf16": "bf16"}[precision]
    run, plain = (
        run_loop(BySetting, {"precision": precision, "modules": {field: patterns}})
        for patterns in (["model.2"], [])
    )
    assert_same_bits(run.weights(), plain.weights())


def test_an_unknown_name_ends_the_run_before_its_first_step(run_loop):
    """An unknown module ends the run before its first step, in any precision."""
    with pytest.raises(ConfigError, match=r'modules\.bf16: no module is named "model\.x"'):
        run_loop(BySetting, {"precision": "fp32", "modules": {"bf16": ["model.x"]}})


class Shouting(nn.Module):
    """A module that multiplies by 24,800 and divides again, which overflows fp16 above 2.64."""

    def forward(self, x):
        return x * 24_800.0 / 24_800.0


class Overflowing(Planted):
    """A recipe whose planted module gets fp16 from a product and overflows for one example."""

    plant = Shouting

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"][0][1] = product = nn.Linear(6, 6, bias=False).requires_grad_(False)
        nn.init.eye_(product.weight)


@pytest.mark.slow
def test_a_module_named_by_a_replay_can_be_moved_to_fp32(run_loop):
    """Moving the module that a replay names to fp32 ends the skips."""
    values = {"scaler": {"init_scale": 64.0, "growth_interval": 10**6}}
    run = run_loop(Overflowing, values)
    names = {event["module"] for event in run.of("replay", found=True, exact=True)}
    assert names == {"model.0.2"}
    mended = run_loop(Overflowing, values | {"modules": {"fp32": sorted(names)}})
    assert run.list_skipped()
    assert not mended.list_skipped()


@pytest.mark.slow
def test_a_replay_goes_through_modules_as_the_run_does(run_loop):
    """With one module in fp32 an overflow in another one is replayed exactly."""
    values = {"scaler": {"init_scale": 64.0}, "modules": {"fp32": ["model.1", "model.3"]}}
    run = run_loop(Overflowing, values)
    replays = run.of("replay", exact=True)
    assert replays
    assert {event["module"] for event in replays} == {"model.0.2"}


def test_a_checkpoint_from_before_the_setting_resumes_exactly(run_loop, tmp_path):
    """A checkpoint from before the setting resumes exactly, with its default."""
    run_loop(BySetting, FP16, folder=tmp_path)
    path = tmp_path / "step-00000005.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["modules"]
    torch.save(state, path)
    longer = FP16 | {"training": {"steps": 8}}
    [resumed] = run_loop(BySetting, longer, folder=tmp_path, resume=path).of("resumed")
    assert resumed["notes"] == ["training.steps was 5, is 8"]
