"""What watching adds to a step: never a wait, and a number of operations that does not grow."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.monitor.gradients import Gradients
from halfstep.monitor.loop import Loop
from halfstep.monitor.ring import Ring

META = torch.device("meta")


def step(net: nn.Module, optimizer: Any, scaler: GradScaler, clip: bool, device: str) -> None:
    """Train one step, with a clip or without."""
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(4, 8, device=device)).square().mean()).backward()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let optimizers be fused on tensors that have shapes and no values."""
    supported = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],  # torch.optim hides it behind a name
        "_get_fused_kernels_supported_devices",
        lambda: [*supported, "meta"],
    )
    monkeypatch.setattr("halfstep.monitor.ring.DRAIN_SECONDS", 1e9)  # what comes then needs CUDA
    monkeypatch.setattr("halfstep.monitor.ring.EAGER_ROWS", 0)
    yield
    if halfstep.session.watch_session._active is not None:
        # Rows of the meta device have nothing to hand over.
        halfstep.session.watch_session._active._loop._ring = None
        halfstep.session.watch_session._active.finish()


def train_on_meta(folder: Path, *, clip: bool, every: int = 0) -> Any:
    """Watch three steps with unreadable values. every: interval of all measurements."""
    net = nn.Linear(8, 1, device=META)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = GradScaler("cpu")
    watch = halfstep.watch(
        net,
        folder=folder,
        name="it",
        histogram_every=every,
        layers_every=every,
        headroom_every=every,
    )
    for _ in range(3):
        step(net, optimizer, scaler, clip, "meta")
        watch.log({"number": 1.0})
    return watch


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.usefixtures("on_meta", "nothing_compiled")
def test_a_watched_step_never_waits_for_the_device(
    tmp_path: Path, clip: bool, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever reads a value raises on the meta device; all three rows were written without."""
    watch = train_on_meta(tmp_path, clip=clip, every=every)
    assert watch._is_on
    assert watch.step == 3
    if every:
        # A histogram and a headroom in each of three steps.
        assert len(watch._loop._diagnoses._host_copies.sent) == 6
        watch._loop._diagnoses._host_copies.sent.clear()
    assert capsys.readouterr().err.count("halfstep:") == 1


@pytest.mark.parametrize(
    ("owner", "place"), [(Gradients, "measure"), (Loop, "_write"), (Loop, "updated")]
)
@pytest.mark.parametrize("ask", ["item", "cpu", "tolist"])
@pytest.mark.usefixtures("on_meta")
def test_the_guard_sees_a_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    place: str,
    ask: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A value read anywhere in there would have ended the watch, or have cost that figure."""
    original = getattr(owner, place)

    def asking(*arguments: Any, **named: Any) -> Any:
        getattr(torch.ones((), device=META), ask)()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, place, asking)
    is_on = train_on_meta(tmp_path, clip=True)._is_on
    assert not is_on or "gradient norms of AdamW: no longer recorded" in capsys.readouterr().err


class Counter(TorchDispatchMode):
    """Counts operations; one over a list of tensors is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Many(nn.Module):
    """A module with a given number of parameters."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(wanted))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, 8)."""
        return x @ torch.stack(list(self.vectors)).sum(dim=0)


def operations(wanted: int, *, clip: bool) -> int:
    """Return how many operations the third step dispatches."""
    net, scaler = Many(wanted), GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for _ in range(2):
        step(net, optimizer, scaler, clip, "cpu")
    with Counter() as counter:
        step(net, optimizer, scaler, clip, "cpu")
    return counter.count


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "most"), [(True, 16), (False, 17)])
def test_operations_do_not_grow_with_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: bool, most: int
) -> None:
    """With rows written by kernels, as on a GPU: as few for 1,000 parameters as for 10."""
    bare = {wanted: operations(wanted, clip=clip) for wanted in (10, 1000)}
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr("halfstep.monitor.ring.DRAIN_SECONDS", 1e9)
    init = Ring.__init__

    def far(self: Any, *args: Any) -> None:
        init(self, *args)
        self.is_on_host = False

    monkeypatch.setattr(Ring, "__init__", far)
    surplus = {}
    for wanted in bare:
        with halfstep.watch(folder=tmp_path, name=f"it-{wanted}") as watch:
            surplus[wanted] = operations(wanted, clip=clip) - bare[wanted]
            assert watch.step == 3
    assert surplus[10] == surplus[1000]
    assert surplus[10] <= most
