"""Every pattern of automatic mixed precision, as a tiny recipe through the real loop.

Each test's docstring names the mutation, the usual mistake, with which it was seen to fail; where
the pattern is the recipe's, the test puts the mistake in itself. docs/explanation/amp.md has a
paragraph each. Elsewhere: gradient penalty and several optimizers in test_wgan_gp.py,
binary_cross_entropy and DataParallel in test_check.py, DistributedDataParallel in test_process.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss, RecipeError
from halfstep.run_config import parse_config
from tests.marks import extended
from tests.trainer.conftest import CPU, Regression, assert_same_bits, drawn
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.data.sampler import Sampler
from trainer.recipes.digits import Digits

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FEW = {
    "training": {"steps": 3, "batch_size": 8, "max_grad_norm": None},
    "scaler": {"init_scale": 256.0},  # at which nothing overflows
}


class Watched(Regression):
    """A regression with a network that records its compute dtypes."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.seen = []
        first = self.modules["model"][0]
        first.register_forward_hook(lambda module, inputs, output: self.seen.append(output.dtype))


@pytest.mark.parametrize("precision", HALF)
def test_autocast_as_a_context_manager(run_loop, precision):
    """In the loop's own region products have the run's type, the loss and the weights fp32.

    Mutation: `with autocast:` taken out of backward_next_loss.
    """

    class Losses(Watched):
        def training_step(self, batch):
            for loss in super().training_step(batch):
                self.seen.append(loss.value.dtype)
                yield loss

    run = run_loop(Losses, {"precision": precision} | FEW)
    assert run.recipe.seen[:2] == [HALF[precision], torch.float32]
    assert {weight.dtype for weight in run.weights().values()} == {torch.float32}


class Decorated(nn.Sequential):
    """A network with autocast as a decorator of forward."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, inputs):
        return super().forward(inputs)


class Inside(nn.Sequential):
    """A network that opens a region in forward, and follows the run's switch."""

    def forward(self, inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu")):
            return super().forward(inputs)


def with_network(network):
    """A watched regression with this class of network."""

    class Chosen(Watched):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["model"] = network(*self.modules["model"])

    return Chosen


@pytest.mark.parametrize(
    ("network", "in_fp16", "in_fp32"),
    [
        (Decorated, torch.bfloat16, torch.bfloat16),
        (Inside, torch.bfloat16, torch.float32),
    ],
)
def test_autocast_as_a_decorator_and_inside_forward(run_loop, network, in_fp16, in_fp32):
    """The innermost region decides; a decorator is on even in fp32, one that follows is not.

    Mutation: Inside without `enabled=`, and Decorated without its decorator.
    """
    chosen = with_network(network)
    assert set(run_loop(chosen, {"precision": "fp16"} | FEW).recipe.seen) == {in_fp16}
    assert set(run_loop(chosen, {"precision": "fp32"} | FEW).recipe.seen) == {in_fp32}


@pytest.mark.parametrize("cast", [True, False])
def test_a_nested_region_that_is_off_wants_its_inputs_cast(run_loop, cast):
    """With .float() the region computes in fp32; without it fp16 meets fp32 weights and raises.
    Mutation: the test makes the mistake itself, `cast=False`.
    """

    class Nested(Watched):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["model"].append(nn.Tanh())
            self.last = nn.Linear(1, 1)
            self.modules["last"] = self.last
            self.optimizers["sgd"].add_param_group({"params": list(self.last.parameters())})

        def training_step(self, batch):
            inputs, targets = batch
            output = self.modules["model"](inputs)
            with torch.autocast("cpu", enabled=False):
                output = self.last(output.float() if cast else output)
                self.seen.append(output.dtype)
            yield Loss(F.mse_loss(output, targets), "sgd")

    if cast:
        run = run_loop(Nested, {"precision": "fp16"} | FEW)
        assert run.recipe.seen == [torch.float16, torch.float32] * 3
        assert not run.list_skipped()
    else:
        with pytest.raises(RuntimeError, match="same dtype"):
            run_loop(Nested, {"precision": "fp16"} | FEW)


def test_bf16_takes_values_that_overflow_fp16(run_loop):
    """A forward pass beyond 65,504 is inf and a skip in fp16, finite and without a scaler in bf16.

    Mutation: make_autocast with torch.float16 for bf16 as well.
    """

    class Large(Regression):
        def training_step(self, batch):
            inputs, targets = batch
            yield Loss(F.mse_loss(self.modules["model"](inputs * 1e6), targets), "sgd")

    half, brain = (run_loop(Large, {"precision": p} | FEW) for p in ("fp16", "bf16"))
    assert half.list_skipped() == [1, 2, 3]
    assert brain.list_skipped() == []
    assert all(math.isfinite(loss) for loss in brain.records["loss"])
    assert not brain.recipe.scaler.is_enabled()


def test_the_device_type_is_always_named(run_loop):
    """Autocast and scaler use the run's device, here the CPU.

    Mutation: make_scaler with "cuda" instead of device.type.
    """

    class Asking(Regression):
        def training_step(self, batch):
            asked.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))
            yield from super().training_step(batch)

    asked = []
    run = run_loop(Asking, {"precision": "fp16"} | FEW)
    assert set(asked) == {(True, False)}
    assert run.recipe.scaler.is_enabled()


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_cache_enabled(run_loop, cache_enabled):
    """A weight changed inside a region is used there only with the cache off.

    The loop's region ends before its optimizer steps, so each step casts again; otherwise, in the
    third assertion, training would continue with the first step's weights. Mutation:
    backward_next_loss keeping one region open over the steps (a stack of contexts).
    """

    class Changing(Regression):
        def training_step(self, batch):
            inputs, targets = batch
            model = self.modules["model"]
            with torch.autocast("cpu", torch.float16, cache_enabled=cache_enabled):
                before = model(inputs)
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(2)
                changed.append(not torch.equal(before, model(inputs)))
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.div_(2)
            outputs.append(model(self.inputs[:4]).detach().clone())
            yield Loss(F.mse_loss(model(inputs), targets), "sgd")

    changed, outputs = [], []
    run_loop(Changing, {"precision": "fp16", "recipe": {"learning_rate": 0.1}} | FEW)
    # The loop's region is the outer one: its cache holds what the inner region cast.
    assert changed[0] is not cache_enabled
    assert not torch.equal(outputs[0], outputs[1])


def test_enabled_is_the_one_switch(run_loop):
    """With autocast and scaler off, the same recipe and loop are plain fp32, to the last bit.
    Mutation: make_autocast with enabled=True.
    """
    values = {"precision": "fp32", "training": {"steps": 20, "max_grad_norm": None}}
    run, config = run_loop(Digits, values), parse_config(Digits, values)
    torch.manual_seed(0)
    recipe, sampler = Digits(config, CPU), Sampler(1437, config.training)
    for _ in range(20):
        [(indices, generator)] = drawn(sampler)
        images, labels = recipe.batch(indices, generator)
        recipe.optimizers["adamw"].zero_grad()
        F.cross_entropy(recipe.modules["model"](images), labels).backward()
        recipe.optimizers["adamw"].step()
    assert_same_bits(run.recipe.modules["model"].state_dict(), recipe.modules["model"].state_dict())


def test_the_scaler_takes_each_of_its_arguments(run_loop):
    """Back-off, growth and the interval between are those that were set, in the run's records.

    Mutation: make_scaler without any one of its four arguments.
    """
    scaler = {
        "init_scale": 2.0**26,
        "growth_factor": 4.0,
        "backoff_factor": 0.125,
        "growth_interval": 3,
    }
    run = run_loop(Digits, {"scaler": scaler, "training": {"steps": 30}})
    expected, applied, skipped = 2.0**26, 0, set(run.list_skipped())
    for record in run.records:
        assert record["scale"] == expected
        applied = 0 if record["step"] in skipped else applied + 1
        expected *= 0.125 if record["step"] in skipped else 4 if applied == 3 else 1
        applied %= 3
    assert 1 in skipped
    assert len(skipped) < 30


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_unscale_then_clip_by_norm(run_loop, scale):
    """The first update has the configured length for any scale.

    Mutation: in train_step, `scaler.unscale_` after the clip: 4096 times too short.
    """
    values = {
        "precision": "fp16",
        "training": {"steps": 1, "max_grad_norm": 0.01},
        "scaler": {"init_scale": scale},
        "recipe": {"learning_rate": 1.0},
    }
    assert _first_update(run_loop, Regression, values).norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_unscale_then_clip_by_value(run_loop, scale):
    """A clip by value belongs into the optimizer's pre-hook: gradients are unscaled by then.

    Mutation: clipping in a gradient's own hook, which runs before they are unscaled.
    """

    class ByValue(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            weights = list(self.modules["model"].parameters())
            self.optimizers["sgd"].register_step_pre_hook(
                lambda *_: torch.nn.utils.clip_grad_value_(weights, 0.001)
            )

    values = {
        "precision": "fp16",
        "training": {"steps": 1},
        "scaler": {"init_scale": scale},
        "recipe": {"learning_rate": 1.0},
    }
    update = _first_update(run_loop, ByValue, values)
    assert update.abs().max() == pytest.approx(0.001, rel=1e-3)


def _first_update(run_loop, recipe_class, values):
    """Return how far the first step moved every weight."""
    before = {}

    class Remembering(recipe_class):
        def __init__(self, config, device):
            super().__init__(config, device)
            model = self.modules["model"]
            before.update({f"model.{k}": v.clone() for k, v in model.state_dict().items()})

    run = run_loop(Remembering, values)
    assert not run.list_skipped()
    return torch.cat([(run.weights()[name] - before[name]).flatten() for name in before])


def test_accumulation_divides_the_loss_and_updates_once(run_loop):
    """Four micro-batches of 8 step like one batch of 32, and count as one step of the scaler.

    Mutations: no division by len(passes); unscale_, step and update within backward_next_loss.
    """
    values = {"precision": "fp16", "scaler": {"init_scale": 256.0, "growth_interval": 2}}
    whole = run_loop(Regression, values | {"training": {"batch_size": 32, "steps": 4}})
    parts = run_loop(
        Regression, values | {"training": {"batch_size": 8, "accumulation_steps": 4, "steps": 4}}
    )
    assert parts.records["scale"].tolist() == [256, 256, 512, 512]
    for name, weight in whole.weights().items():
        torch.testing.assert_close(parts.weights()[name], weight, rtol=1e-2, atol=1e-4)


def make_square(*decorations):
    """Return a custom Function with these decorators of forward and backward."""
    forward_by, backward_by = decorations or ((lambda f: f), (lambda f: f))

    class SquaredProduct(torch.autograd.Function):
        @staticmethod
        @forward_by
        def forward(context, inputs, weight):
            product = inputs.mm(weight.t())
            context.save_for_backward(inputs, weight, product)
            return product.square()

        @staticmethod
        @backward_by
        def backward(context, gradient):
            inputs, weight, product = context.saved_tensors
            inner = 2 * product * gradient
            return inner.mm(weight), inner.t().mm(inputs)

    return SquaredProduct


def with_function(function):
    """A regression with a custom autograd Function as last layer."""

    class Custom(Watched):
        def training_step(self, batch):
            inputs, targets = batch
            first, _, last = self.modules["model"]
            product = function.apply(torch.tanh(first(inputs)), last.weight)
            self.seen.append(product.dtype)
            yield Loss(F.mse_loss(product + last.bias, targets.square()), "sgd")

    return Custom


def test_a_custom_function_runs_backward_as_it_ran_forward(run_loop):
    """custom_fwd and custom_bwd give backward the region that forward had.

    Mutation: without the decorations, which is the second half of this test.
    """
    decorations = torch.amp.custom_fwd(device_type="cpu"), torch.amp.custom_bwd(device_type="cpu")
    run = run_loop(with_function(make_square(*decorations)), {"precision": "fp16"} | FEW)
    assert not run.list_skipped()
    with pytest.raises(RuntimeError, match="same dtype"):
        run_loop(with_function(make_square()), {"precision": "fp16"} | FEW)


def test_cast_inputs_keeps_a_custom_function_in_fp32(run_loop):
    """With cast_inputs the inputs come in fp32 and autocast is off inside.

    Mutation: custom_fwd without cast_inputs.
    """
    decorations = (
        torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32),
        torch.amp.custom_bwd(device_type="cpu"),
    )
    run = run_loop(with_function(make_square(*decorations)), {"precision": "fp16"} | FEW)
    assert run.recipe.seen == [torch.float16, torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, *extended([False])])
def test_master_weights_are_fp32(run_loop, dtype, fused):
    """A half-precision model is rejected by name, before its first step.

    Mutation: `watch` without its check of dtypes; the fused optimizer then trains silently.
    """

    class Halved(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["model"].to(dtype)

    with pytest.raises(RecipeError, match=r"parameter model.0.weight .* \(no .half\(\)\)"):
        run_loop(Halved, {"precision": "fp16", "training": {"fused": fused}})


@pytest.mark.slow
def test_saving_and_resuming_continue_to_the_bit(run_loop, tmp_path):
    """Model, optimizer and scaler come back: a resumed run ends as an undisturbed one.

    Mutations: restore without the optimizer's state; without the scaler's; without its tracker.
    """
    values = {"scaler": {"growth_interval": 7, "init_scale": 2.0**20}, "training": {"steps": 40}}
    whole = run_loop(Digits, values)
    half = {"checkpoints": {"every_steps": 20}}
    run_loop(Digits, values | half, folder=tmp_path)
    resumed = run_loop(Digits, values, resume=tmp_path / "step-00000020.pt")
    assert_same_bits(resumed.weights(), whole.weights())
    assert_same_bits(resumed.recipe.scaler.state_dict(), whole.recipe.scaler.state_dict())
    assert resumed.records["scale"].tolist() == whole.records["scale"][20:].tolist()


def test_an_unfused_state_is_not_resumed_by_a_fused_optimizer(run_loop, tmp_path):
    """PyTorch would raise in the next step, or silently wait for the device again, so it is
    rejected.

    Mutation: restore without its comparison of training.fused.
    """
    values = {"training": {"steps": 2, "fused": False}}
    run_loop(Digits, values, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"training.fused False"):
        run_loop(Digits, {"training": {"steps": 3}}, resume=tmp_path / "step-00000002.pt")


def test_a_compiled_model_trains_under_its_own_names(run_loop):
    """module.compile() works in place: the same weights, by the same names, as uncompiled.

    Mutation: `torch.compile(model)` instead of `model.compile()`: "_orig_mod" in every name.
    """

    class Compiled(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["model"].compile(backend="aot_eager")  # all but the making of kernels

    values = {"precision": "fp16", "training": {"steps": 3, "batch_size": 8}}
    compiled, plain = run_loop(Compiled, values), run_loop(Regression, values)
    assert compiled.recipe.modules["model"]._compiled_call_impl is not None
    assert compiled.weights().keys() == plain.weights().keys()
    for name, weight in plain.weights().items():
        torch.testing.assert_close(compiled.weights()[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_is_a_switch(run_loop, deterministic):
    """With training.deterministic on, an operation without a deterministic algorithm raises; with
    it off, it runs. Mutation: make_deterministic without use_deterministic_algorithms.
    """

    class Scattering(Regression):
        def batch(self, indices, generator):
            inputs, targets = super().batch(indices, generator)
            order = torch.arange(len(targets))[:, None]
            return inputs, targets.clone().put_(order, targets)

    values = {"training": {"deterministic": deterministic, "steps": 2, "batch_size": 8}}
    if deterministic:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            run_loop(Scattering, values)
    else:
        assert run_loop(Scattering, values).outcome.status == "finished"
