"""A precision diff leaves the training bit-identical."""

import gc
import random
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep import precision_diff
from tests.halfstep.precision_lab.models_made import MODELS, USUAL, Loss
from tests.marks import sampled

STEPS = 2


def train(
    make: Callable[[], nn.Module],
    make_batch: Callable[[], Any],
    loss_fn: Loss,
    dtype: torch.dtype,
    diff: Callable[[nn.Module, Any], object],
) -> list[Any]:
    """Train some steps with autocast; return all numbers that a later step depends on."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = make()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    seen: list[Any] = []
    for _ in range(STEPS):
        batch = make_batch()
        diff(model, batch)  # between steps, with gradients of the last one
        with torch.autocast("cpu", dtype):
            diff(model, batch)  # within autocast
            loss = loss_fn(model, tree_map(lambda t: t.clone(), batch))
        diff(model, batch)  # while a graph waits for its backward pass
        optimizer.zero_grad()
        loss.backward()
        diff(model, batch)  # before the update
        optimizer.step()
        seen += [loss, *(p.grad for p in model.parameters()), batch]
        seen += [torch.get_rng_state(), random.random(), np.random.random()]
        for module in model.modules():
            seen += [v for v in vars(module).values() if isinstance(v, Tensor | int)]
            seen.append(list(getattr(module, "history", ())))
            hooks = [v for k, v in vars(module).items() if k.endswith("_hooks")]
            seen += [len(hook) for hook in hooks]
        seen += [p.requires_grad for p in model.parameters()]
    seen += [torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()]
    return [*seen, *model.state_dict().values(), optimizer.state_dict()]


def flat(values: list[Any]) -> list[Any]:
    """Return numbers as bytes, so that equal NaN compare as equal."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [v.detach().numpy().tobytes() if isinstance(v, Tensor) else v for v in leaves]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("name", sampled(MODELS, [*USUAL, "recurrent", "counting"]))
def test_training_is_bit_identical(name: str, dtype: torch.dtype) -> None:
    """Steps around diffs, at every point of the loop, are bit-identical to steps without them."""
    make, make_batch, loss_fn = MODELS[name]
    without = train(make, make_batch, loss_fn, dtype, lambda _m, _b: None)
    reports = []
    with_diffs = train(
        make,
        make_batch,
        loss_fn,
        dtype,
        lambda model, batch: reports.append(precision_diff(model, batch, loss_fn, dtype)),
    )
    assert flat(with_diffs) == flat(without)
    assert len(reports) == 4 * STEPS


@pytest.mark.parametrize("name", sampled(MODELS, USUAL))
def test_nothing_is_kept(name: str) -> None:
    """After a diff no new tensor is left, even without garbage collection."""
    make, make_batch, loss_fn = MODELS[name]
    model, batch = make(), make_batch()
    counts = []
    gc.disable()
    gc.freeze()  # for good: it leaves these lists, and all later collections, short
    try:
        for _ in range(3):
            precision_diff(model, batch, loss_fn, torch.bfloat16)
            counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[1] == counts[2]


class Remembers(nn.Module):
    """A module that stores results in nested containers, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.recent: deque[Tensor] = deque(maxlen=3)
        self.by_name: dict[str, Any] = {"all": [], "seen": {"inner": set()}, "pair": ([], {})}

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output. x: (B, 4)."""
        out: Tensor = self.layer(x) + sum(self.recent)
        self.recent.append(out.detach())
        self.by_name["all"].append(len(self.recent))
        self.by_name["seen"]["inner"].add(len(self.by_name["all"]))
        self.by_name["pair"][0].append(1)
        self.by_name["pair"][1][len(self.by_name["all"])] = 1
        return out


def test_containers_of_a_module_stay_as_they_are() -> None:
    """Lists, dictionaries, sets and deques that a forward pass changes are restored, at any
    depth.
    """
    model, batch = Remembers(), torch.ones(2, 4)
    model(batch)
    state = deepcopy((list(model.recent), model.by_name))
    precision_diff(model, batch, lambda model, batch: model(batch).square().mean(), torch.bfloat16)
    assert repr((list(model.recent), model.by_name)) == repr(state)
    assert model.recent.maxlen == 3


def test_other_threads_keep_autocast() -> None:
    """Another thread that computes during a diff keeps its own autocast precision."""
    seen: list[torch.dtype] = []

    def compute() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        thread = Thread(target=compute)
        thread.start()
        thread.join()
        loss: Tensor = model(batch).square().mean()
        return loss

    precision_diff(nn.Linear(4, 4), torch.ones(2, 4), loss_fn, torch.bfloat16)
    assert len(seen) > 1
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("name", sampled(MODELS, USUAL))
def test_diff_repeats_itself(name: str) -> None:
    """Two diffs of the same state are equal, and know each call's local error."""
    make, make_batch, loss_fn = MODELS[name]
    model, batch = make(), make_batch()
    first, second = (precision_diff(model, batch, loss_fn, torch.bfloat16) for _ in range(2))
    assert repr(first.rows) == repr(second.rows)
    assert [row.unknown for row in first.rows if row.unknown] == []


def test_state_is_restored_after_an_error() -> None:
    """A model that raises in a diff's second pass is left as it was."""
    model, batch = MODELS["counting"][0](), MODELS["counting"][1]()
    before = flat([model.state_dict(), vars(model)["plain"], batch])
    calls = 0

    def failing(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = model(batch[0]).sum()
        if calls == 2:
            raise RuntimeError("the second pass")
        return loss

    state = torch.get_rng_state()
    original = nn.Module.__call__
    with pytest.raises(RuntimeError, match="the second pass"):
        precision_diff(model, batch, failing, scale=1.0)
    assert flat([model.state_dict(), vars(model)["plain"], batch]) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.Module.__call__ is original
    assert model.calls == 0
