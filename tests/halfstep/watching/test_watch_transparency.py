"""Watching changes no value, weight, state or exception, whatever a loop passes to torch."""

import tempfile
import warnings
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from halfstep.session import active_run

Pair = namedtuple("Pair", "first second")


class OwnScaler(GradScaler):
    """A subclass of the scaler, as frameworks have."""

    def scale(self, outputs: Any) -> Any:
        """Scale as torch does."""
        return super().scale(outputs)


class OwnOptimizer(torch.optim.SGD):
    """A subclass of the optimizer that calls its parent's step."""

    def step(self, closure: Any = None) -> Any:
        """Step as torch does."""
        return super().step(closure)


class Net(nn.Module):
    """A network with dense, sparse, complex, unused and zero-dimensional parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.table = nn.Embedding(5, 3, sparse=True)
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the loss. x: (B, 4)."""
        rows = self.table(torch.tensor([0, 2, 2]))
        turned = (self.dense(x) * self.turn).abs().mean()
        out: Tensor = self.gain * turned + rows.square().mean()
        return out


SCALERS: dict[str, Callable[[], GradScaler]] = {
    "plain": lambda: GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
    "subclass": lambda: OwnScaler("cpu", init_scale=8.0),
    "disabled": lambda: GradScaler("cpu", enabled=False),
}
OPTIMIZERS: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "subclass": lambda net: OwnOptimizer(net.parameters(), lr=0.1),
    "fused": lambda net: torch.optim.AdamW(net.dense.parameters(), lr=0.1, fused=True),
    "LBFGS": lambda net: torch.optim.LBFGS(net.dense.parameters(), max_iter=3),
    "relative": lambda net: torch.optim.Adafactor([net.gain], lr=0.1),
    "sparse": lambda net: torch.optim.SparseAdam(list(net.table.parameters())),
}


class Loop:
    """A network with optimizer and scaler, and the results of calls."""

    def __init__(self, scaler: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.scaler, self.optimizer = SCALERS[scaler](), OPTIMIZERS[optimizer](self.net)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaled: Any = None
        self.came_to: list[Any] = []

    def losses(self, count: int, factor: float = 1.0) -> list[Tensor]:
        """Return losses of different batches."""
        batches = [torch.full((2, 4), float(i + 1)) for i in range(count)]
        return [self.net(x) * factor for x in batches]

    def call(self, action: Callable[["Loop"], Any]) -> None:
        """Call a function; return its result or exception."""
        try:
            self.came_to.append(plain(action(self)))
        except Exception as error:
            self.came_to.append((type(error).__name__, str(error)))

    def state(self) -> list[Any]:
        """Return all state in which a loop could see a difference."""
        gradients = [None if p.grad is None else plain(p.grad) for p in self.net.parameters()]
        groups = [{**group, "params": None} for group in self.optimizer.param_groups]
        # Not state_dict(), which raises once a parameter is replaced.
        own = [groups, list(self.optimizer.state.values())]
        state = [own, self.scaler.state_dict(), self.schedule.state_dict()]
        return [self.came_to, plain(list(self.net.parameters())), gradients, plain(state)]


def plain(value: Any) -> Any:
    """Return a value's bits, in a form that compares by equality."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        kind = type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad
        return (*kind, dense.resolve_conj().numpy().tobytes())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(each) for each in value]
    return type(value).__name__, value if isinstance(value, int | float | str) else None


def flat(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result of `scale`, using up an iterator as a loop does."""
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for each in value:
            yield from flat(each)


SHAPES: dict[str, Callable[[list[Tensor]], Any]] = {
    "tensor": lambda losses: losses[0],
    "list": list,
    "tuple": tuple,
    "nested": lambda losses: [losses[0], (losses[1], [losses[2]])],
    "named": lambda losses: Pair(*losses[:2]),
    "generator": lambda losses: (each for each in losses),
    "map": lambda losses: map(torch.Tensor.clone, losses),
    "deque": deque,
    "values": lambda losses: dict(enumerate(losses)).values(),
    "list of generators": lambda losses: [iter(losses[:1]), losses[1]],
    "empty": lambda losses: [],
    "vector": torch.stack,
    "constant": lambda losses: torch.ones(()),
    "nothing": lambda losses: None,
    "number": lambda losses: 1.0,
}


def scale(shape: str, factor: float) -> Callable[[Loop], Any]:
    """Return an action that scales losses in a container."""

    def action(loop: Loop) -> Any:
        loop.scaled = loop.scaler.scale(SHAPES[shape](loop.losses(3, factor)))
        return loop.scaled if isinstance(loop.scaled, Tensor | list | tuple) else None

    return action


def backward(loop: Loop) -> list[Any]:
    scaled, loop.scaled = loop.scaled, None
    return [each.sum().backward() if each.ndim else each.backward() for each in flat(scaled)]


def closure_step(loop: Loop) -> Any:
    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        [loss] = loop.losses(1)
        loss.backward()
        return loss

    return loop.optimizer.step(closure)


def by_grad(loop: Loop) -> Any:
    [loss] = loop.losses(1)
    parameters = list(loop.net.dense.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.detach()
    return gradients


def penalty(loop: Loop) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    [slope] = torch.autograd.grad(loop.net(x), x, create_graph=True)
    slope.square().sum().backward()


def with_gradient(loop: Loop) -> None:
    out = loop.net.dense(torch.ones(2, 4))
    torch.autograd.backward([out, out.sum()], [torch.ones_like(out), None])


def replace_parameter(loop: Loop) -> None:
    new = nn.Parameter(loop.net.gain.detach().clone())
    for group in loop.optimizer.param_groups:
        group["params"] = [new if p is loop.net.gain else p for p in group["params"]]
    loop.net.gain = new


def clip(loop: Loop, how: str) -> Any:
    parameters = loop.net.dense.parameters() if how == "iterator" else [loop.net.gain]
    return nn.utils.clip_grad_norm_(parameters, 0.5)


ACTIONS: dict[str, Callable[[Loop], Any]] = {
    **{f"scale {shape}": scale(shape, 1.0) for shape in SHAPES},
    "scale inf": scale("tensor", float("inf")),
    "scale list with nan": scale("list", float("nan")),
    "backward": backward,
    "unscale_": lambda loop: loop.scaler.unscale_(loop.optimizer),
    "scaler.step": lambda loop: loop.scaler.step(loop.optimizer),
    "scaler.step with closure": lambda loop: loop.scaler.step(loop.optimizer, lambda: 1.0),
    "update": lambda loop: loop.scaler.update(),
    "update to a number": lambda loop: loop.scaler.update(16.0),
    "update to a tensor": lambda loop: loop.scaler.update(torch.tensor(4.0)),
    "update to a whole number": lambda loop: loop.scaler.update(4),
    "optimizer.step": lambda loop: loop.optimizer.step(),
    "optimizer.step with closure": closure_step,
    "zero_grad": lambda loop: loop.optimizer.zero_grad(),
    "zero_grad in place": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "unscaled backward": lambda loop: loop.losses(1)[0].backward(),
    "autograd.backward": lambda loop: torch.autograd.backward(loop.losses(2)),
    "autograd.grad": by_grad,
    "gradient penalty": penalty,
    "backward with gradient": with_gradient,
    "clip an iterator": partial(clip, how="iterator"),
    "clip a list": partial(clip, how="list"),
    "empty group": lambda loop: loop.optimizer.param_groups.append({"params": [], "lr": None}),
    "no rate": lambda loop: loop.optimizer.param_groups[0].update(lr=None),
    "replace a parameter": replace_parameter,
    "schedule": lambda loop: loop.schedule.step(),
    "load": lambda loop: loop.scaler.load_state_dict(loop.scaler.state_dict()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
@settings(max_examples=min(60, 2 * settings.default.max_examples))
@given(
    scaler=st.sampled_from(sorted(SCALERS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), max_size=14),
    repeats=st.integers(1, 3),
)
def test_a_watched_loop_is_the_unwatched_one(
    scaler: str, optimizer: str, actions: list[str], repeats: int
) -> None:
    """Results, gradients, weights, state and exceptions equal the unwatched loop's, bit for bit."""
    states = []
    for is_watched in (False, True):
        loop = Loop(scaler, optimizer)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of loops that are wrong on purpose
            watch = halfstep.watch(loop.net, folder=folder, mode="offline") if is_watched else None
            try:
                for name in actions * repeats:
                    loop.call(ACTIONS[name])
            finally:
                if watch is not None:
                    is_still_watched = watch._run.guard.is_on
                    watch.finish()
        states.append(loop.state())
    assert states[0] == states[1]
    assert is_still_watched
    assert active_run.active is None
