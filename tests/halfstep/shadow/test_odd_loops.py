"""Unusual loops: a check changes no bit, raises nothing and finds no fault.

A loop marked as an expected failure is one that the check does not support yet.
"""

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from halfstep.shadow.operations import Operation
from tests.halfstep.shadow.checked import Loop, assert_equal_and_healthy, check_loop, train
from tests.halfstep.shadow.test_bits import Counting, net, of, squares
from tests.marks import sampled

pytestmark = pytest.mark.filterwarnings("ignore")


def with_value(change: Callable[[Tensor], Tensor | None]) -> Any:
    """Train with a detached half-precision result that a script changes."""
    model = net()

    def loss() -> Tensor:
        result = model(torch.randn(4, 8))
        value = result.detach().clone()
        changed = change(value)
        return (result + (value if changed is None else changed)).float().square().mean()

    return train(model, loss)


def with_gradients(change: Callable[[Tensor], object]) -> Any:
    """Train with gradients that a script changes before they are unscaled."""
    model = nn.Linear(8, 8)

    def backward(loss: Tensor) -> None:
        loss.backward()
        for parameter in model.parameters():
            change(parameter.grad)

    return of(model, backward=backward)


def plain(loss: Callable[[nn.Module], Tensor], **options: Any) -> Any:
    """Train a small network with a loss of it."""
    model = net()
    return train(model, lambda: loss(model), **options)


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# --- what a check bears


def adapted() -> Any:
    """Train by MAML: the module's weights are temporarily results of the inner step."""
    model = nn.Linear(8, 8)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters())
    for _ in range(3):
        slopes = torch.autograd.grad(squares(model)(), list(own.values()), create_graph=True)
        for (name, weight), slope in zip(own.items(), slopes, strict=True):
            del model._parameters[name]
            setattr(model, name, weight - 0.1 * slope)
        loss = squares(model)()
        for name, weight in own.items():
            delattr(model, name)
            model.register_parameter(name, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def sharpness_aware() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 8)
        model(x).square().mean().backward()
        moves = [0.05 * each.grad / (each.grad.norm() + 1e-12) for each in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
    return model


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps through an inner one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(fast, 0.5)
            fast.copy_(slow)


def lookahead() -> Any:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return of(model, optimizer=Lookahead(inner))


class OwnScaler(GradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)


def own_scaler() -> Any:
    model, scaler = net(), OwnScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = squares(model)()
        scaler.scale(outputs=loss).backward()
        scaler.unscale_(optimizer=optimizer)
        scaler.step(optimizer=optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.state_dict()


def swapped_weights() -> Any:
    """Evaluate with averaged weights, by `.data`."""
    model = net()
    averages = [each.detach().clone() for each in model.parameters()]

    def loss() -> Tensor:
        own = [each.data for each in model.parameters()]
        for weight, average in zip(model.parameters(), averages, strict=True):
            weight.data = average.mul_(0.9).add_(weight.detach(), alpha=0.1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # else the casts stay
            model(torch.randn(4, 8))
        for weight, data in zip(model.parameters(), own, strict=True):
            weight.data = data
        return squares(model)()

    return train(model, loss), averages


def resized() -> Any:
    queue = torch.zeros(4, 8, dtype=torch.float16)

    def change(value: Tensor) -> Tensor:
        queue.resize_(8, 8)[:4] = value
        queue[4:] = 1
        return queue.resize_(4, 8)

    return with_value(change), queue


def inference_mode() -> Any:
    average = torch.zeros(4, 8)

    def change(value: Tensor) -> Tensor:
        with torch.inference_mode():
            average.copy_(value)
        return average.mul_(0.9).add_(value)

    return with_value(change), average


def two_tensors() -> Any:
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            squares(model)().backward()
        optimizer.step()
    return model.weight.a, model.weight.b


def empty() -> Any:
    def loss(model: nn.Module) -> Tensor:
        nothing = model(torch.randn(0, 8)).sum() + F.pad(torch.randn(0, 3).half(), (1, 1)).sum()
        return model(torch.randn(4, 8)).square().mean() + nothing

    return plain(loss)


def masked() -> Any:
    def loss(model: nn.Module) -> Tensor:
        scores, mask = model(torch.randn(4, 8)), torch.eye(4, 8, dtype=torch.bool)
        lowest = torch.finfo(scores.dtype).min
        filled = [scores.masked_fill(mask, value) for value in (-torch.inf, lowest)]
        return sum(each.softmax(-1).square().mean() for each in filled)

    return plain(loss)


def in_asyncio() -> Any:
    async def loop() -> Any:
        await asyncio.sleep(0)
        return of(net())

    return asyncio.run(loop())


def master_weights() -> Any:
    model = net().half()
    masters = [each.detach().float().requires_grad_() for each in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    for _ in range(4):
        (model(torch.randn(4, 8).half()).float().square().mean() * 1024).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad = weight.grad.float() / 1024
            weight.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
    return model


def selective_checkpoint() -> Any:
    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_saved = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return plain(
        lambda model: (
            checkpoint(model, torch.randn(4, 8), use_reentrant=False, context_fn=contexts)
            .square()
            .mean()
        )
    )


def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return of(nn.Sequential(net(), nn.Dropout(0.1)))
    finally:
        torch.use_deterministic_algorithms(False)


def traced_and_profiled() -> Any:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 8)
        with torch.profiler.profile(), torch.autocast("cpu", enabled=False):
            torch.jit.trace(model, x)(x)
        return torch.fx.symbolic_trace(model)(x).square().mean()

    return plain(loss)


BORNE: list[Loop] = [
    *(adapted, sharpness_aware, lookahead, own_scaler, swapped_weights, resized, inference_mode),
    *(two_tensors, empty, masked, in_asyncio, master_weights, selective_checkpoint),
    *(deterministic, traced_and_profiled),
]

# --- what it does not


def running_statistics() -> Any:
    """Update statistics by SyncBatchNorm's operators, whose schema does not declare the change."""
    mean, variance = torch.zeros(8), torch.ones(8)

    def change(value: Tensor) -> None:
        torch.batch_norm_update_stats(value, mean, variance, 0.1)

    return with_value(change), mean, variance


class Functions(TorchFunctionMode):
    """A function mode that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def own_mode(kind: type[Functions | Counting]) -> Any:
    mode = kind()
    with mode:
        return of(net()), mode.calls


def lazy_modules() -> Any:
    model = nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyLinear(4))
    optimizer = None
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = squares(model)()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def fake_tensors() -> Any:
    def loss(model: nn.Module) -> Tensor:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.autocast("cpu", enabled=False):
            model(torch.randn(4, 8))
        return squares(model)()

    return plain(loss)


def exported() -> Any:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            torch.export.export(model, (torch.randn(4, 8),))
        return squares(model)()

    return plain(loss)


def compiled_whole() -> Any:
    class Whole(nn.Sequential):  # torch may have given up on Sequential's own forward
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    def loss(model: nn.Module) -> Tensor:
        fast = torch.compile(Whole(model), backend="eager", fullgraph=True)
        return fast(torch.randn(4, 8)).square().mean()

    return plain(loss)


def conditional() -> Any:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 8)
        return torch.cond(x.sum() > 0, model, lambda x: model(x) * 2, (x,)).square().mean()

    return plain(loss, dtype=torch.bfloat16)


def loss_with_equality() -> Any:
    @dataclass
    class Power(nn.Module):
        exponent: float = 2.0

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return (x.abs() ** self.exponent).mean()

    model = net()
    power = Power.__new__(Power)
    nn.Module.__init__(power)
    power.exponent = 2.0
    return train(model, lambda: power(model(torch.randn(4, 8))))


def deep_modules() -> Any:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Linear(8, 8)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self(x, depth - 1) if depth else self.leaf(x)

    model = Nested()
    return train(model, lambda: model(torch.randn(4, 8), 190).square().mean())


def in_a_thread() -> Any:
    results: list[Any] = []
    run_in_thread(lambda: results.append(of(net())))
    return results


def accumulated_in_a_thread() -> Any:
    model, scaler = net(), GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        for factor in (1, 50):
            with torch.autocast("cpu", torch.float16):
                loss = scaler.scale(squares(model)() * factor)
            run_in_thread(loss.backward) if factor > 1 else loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def through_numpy(value: Tensor) -> None:
    value.numpy()[...] = 3.0


def as_integers(value: Tensor) -> None:
    value.fill_(-2.0).view(torch.int16).bitwise_and_(0x7FFF)


def sparse_weights() -> Any:
    model, weight = net(), nn.Parameter(torch.eye(8).to_sparse())
    optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.sparse.mm(weight, model(torch.randn(8, 8))).square().mean().backward()
        optimizer.step()
    return model


def frozen_rows(gradient: Tensor) -> None:
    gradient[:2] = 0


def frozen_index(gradient: Tensor) -> None:
    gradient.index_fill_(0, torch.tensor([0]), 0.0)


def frozen_mask(gradient: Tensor) -> None:
    gradient.mul_(torch.ones_like(gradient))


def upper_triangle(gradient: Tensor) -> Tensor:
    return gradient.triu_() if gradient.dim() == 2 else gradient


def surgery(gradient: Tensor) -> None:
    """Project a gradient onto the normal plane of another, as PCGrad does."""
    one, other = gradient.flatten(), gradient.flip(0).flatten()
    gradient.copy_((one - (one @ other) / (other @ other) * other).view_as(gradient))


EDITS = [frozen_rows, frozen_index, frozen_mask, upper_triangle, surgery]
MENDED: dict[str, Loop] = {
    "running_statistics": running_statistics,
    "dispatch_mode": partial(own_mode, Counting),
    "lazy_modules": lazy_modules,
    "fake_tensors": fake_tensors,
    "exported": exported,
    "compiled_whole": compiled_whole,
    "loss_with_equality": loss_with_equality,
    "in_a_thread": in_a_thread,
    "as_integers": partial(with_value, as_integers),
    "sparse_weights": sparse_weights,
    **{edit.__name__: partial(with_gradients, edit) for edit in EDITS},
}
FAILING: dict[str, tuple[Loop, str]] = {
    "function_mode": (partial(own_mode, Functions), "a clip calls fewer functions than bare"),
    "conditional": (conditional, "the result of a higher order operator has no gradient"),
    "deep_modules": (deep_modules, "raises RecursionError: hooks add a frame to each module"),
    "accumulated_in_a_thread": (accumulated_in_a_thread, "gradients_differ: a shadow is stale"),
    "through_numpy": (partial(with_value, through_numpy), "loss_differs: a shadow is stale"),
}
#: Loops under torch's own tracers and profiler, which take seconds; for `make test-all`.
TOOLS = [traced_and_profiled, exported, conditional]


@pytest.mark.parametrize(
    "loop",
    sampled(BORNE, [each for each in BORNE if each not in TOOLS]),
    ids=lambda loop: loop.__name__,
)
def test_an_unusual_loop_is_equal_to_the_bit(loop: Loop) -> None:
    assert_equal_and_healthy(loop)


@pytest.mark.parametrize(
    "loop",
    sampled(MENDED.values(), [each for each in MENDED.values() if each not in TOOLS]),
    ids=MENDED,
)
def test_a_loop_that_once_failed_is_equal_to_the_bit(loop: Loop) -> None:
    assert_equal_and_healthy(loop)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(
            loop,
            id=name,
            marks=[
                pytest.mark.xfail(strict=True, reason=reason),
                *([pytest.mark.extended] if loop in TOOLS else []),
            ],
        )
        for name, (loop, reason) in FAILING.items()
    ],
)
def test_a_loop_that_the_check_should_bear(loop: Loop) -> None:
    assert_equal_and_healthy(loop)


def operations_left(loop: Loop) -> int:
    """Return how many recorded operations a check holds after a step."""
    counts: list[int] = []

    def count() -> None:
        loop()
        gc.collect()
        counts.append(sum(isinstance(each, Operation) for each in gc.get_objects()))

    check_loop(count)
    return counts[0]


def evaluated() -> None:
    model, total = net(), torch.zeros(())
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        for _ in range(200):
            total += squares(model)()


def stepped_by_hand() -> None:
    model = net()
    for _ in range(100):
        with torch.autocast("cpu", torch.float16):
            squares(model)().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None


def trained() -> None:
    of(net(), steps=50)


@pytest.mark.parametrize(
    "loop",
    [
        trained,
        evaluated,
        pytest.param(
            stepped_by_hand,
            marks=[
                pytest.mark.xfail(strict=True, reason="no step ends"),
                pytest.mark.extended,
            ],
        ),
    ],
)
def test_memory_does_not_grow(loop: Loop) -> None:
    assert operations_left(loop) < 1000


class Largest(TorchDispatchMode):
    """A mode below the check that records the size of the largest tensor read."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::sum", "aten::_to_copy"):
            self.elements = max(self.elements, args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_data_set_is_not_read_as_a_whole(dtype: torch.dtype) -> None:
    data, model = torch.zeros(100_000, 8, dtype=dtype), net()
    with Largest() as largest:
        check_loop(
            lambda: train(
                model, lambda: model(data[torch.tensor([1, 5])].float()).square().mean(), steps=1
            )
        )
    assert largest.elements < data.numel()
