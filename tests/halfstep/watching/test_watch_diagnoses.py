"""Periodic measurements of a watched loop, compared with a loop that measures itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import to_builtins
from torch import nn
from torch.nn.modules import module as hooks

import halfstep
from halfstep.recording import reader
from halfstep.session import active_run
from halfstep.watching.exponents import describe
from tests.halfstep.watching.watch_made import Net, Script, Written
from tests.spool_made import event_of

ALL = {"histogram_every": 3, "layers_every": 2, "headroom_every": 4}
STEPS = 13


@pytest.fixture(autouse=True)
def undone(nothing_compiled: None) -> Iterator[None]:
    """End the run of the test, and assert that no hook is left."""
    yield
    if active_run.active is not None:
        active_run.active.finish()
    assert not hooks._global_forward_hooks


class Reference:
    """A loop in fp16 that waits for the device to store each step's values."""

    def __init__(self, *, fused: bool) -> None:
        self.fused = fused
        self.gradients: list[dict[str, torch.Tensor]] = []  # by step, unscaled
        self.largest: list[dict[str, tuple[float, float]]] = []
        self.scales: list[float] = []

    def train(self, folder: Path, *, looks: bool, **every: int) -> list[torch.Tensor]:
        """Train a watched loop, with or without its measurements. Return the weights."""
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=self.fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
        with halfstep.watch(net, folder=folder, name="it", **every):
            for _ in range(STEPS):
                passed: dict[str, list[torch.Tensor]] = {}
                optimizer.zero_grad()
                taken = [
                    part.register_forward_hook(self._keep(passed, name))
                    for name, part in net.named_children()
                    if looks
                ]
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = net(torch.randn(16, 8)).square().mean()
                scaler.scale(loss).backward()
                for hook in taken:
                    hook.remove()
                if looks:
                    self._note(net, scaler, passed)
                scaler.step(optimizer)
                scaler.update()
        return [p.detach() for p in net.parameters()]

    def _keep(self, passed: dict[str, list[torch.Tensor]], name: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: passed[name].append(gradient.detach()))
            passed[name] = [output.detach()]

        return keep

    def _note(self, net: nn.Module, scaler: Any, passed: dict[str, list[torch.Tensor]]) -> None:
        scale = scaler.get_scale()
        self.scales.append(scale)
        self.gradients.append({n: p.grad / scale for n, p in net.named_parameters()})
        self.largest.append(
            {n: (out.abs().max().item(), g.abs().max().item()) for n, (out, g) in passed.items()}
        )


@pytest.mark.parametrize("fused", [False, True])
def test_the_requested_steps_are_returned(tmp_path: Path, fused: bool) -> None:
    """Exponents, layer norms and largest numbers equal the loop's own, in due steps only."""
    reference = Reference(fused=fused)
    reference.train(tmp_path, looks=True, **ALL)
    written = Written(tmp_path / "it")

    histograms = written.of("histogram")
    assert [each["step"] for each in histograms] == [3, 6, 9, 12]
    for each in histograms:
        assert each["scale"] == reference.scales[each["step"] - 1]
        gradients = reference.gradients[each["step"] - 1]
        for module in each["modules"]:
            own = [g.flatten() for n, g in gradients.items() if n.startswith(module["name"])]
            bits = (torch.cat(own).view(torch.int32) >> 23) & 0xFF
            counts = np.bincount(bits.numpy(), minlength=256)
            assert module == to_builtins(describe(module["name"], counts, each["scale"]))

    layers = written.of("layer_norms")
    assert [each["step"] for each in layers] == [2, 4, 6, 8, 10, 12]
    for each in layers:
        gradients = reference.gradients[each["step"] - 1]
        assert each["layers"] == ["body", "head"]
        for name, norm in zip(each["layers"], each["norms"], strict=True):
            own = [g.flatten() for n, g in gradients.items() if n.startswith(name)]
            assert norm == pytest.approx(torch.cat(own).norm().item(), rel=1e-5)

    looks = written.of("headroom")
    assert [each["step"] for each in looks] == [4, 8, 12]
    for each in looks:
        found = {m["name"]: (m["activation"], m["gradient"]) for m in each["modules"]}
        assert found == reference.largest[each["step"] - 1]
    assert all(map(event_of, written.events))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_request_changes_no_bit(tmp_path: Path, fused: bool) -> None:
    """Requested measurements change no weight, in skipped steps either."""
    bare = Reference(fused=fused).train(tmp_path / "bare", looks=False)
    asked = dict.fromkeys(ALL, 1)
    watched = Reference(fused=fused).train(tmp_path / "watched", looks=False, **asked)
    assert all(map(torch.equal, bare, watched))
    script = Script(fused=fused)
    weights = script.train().weights
    with halfstep.watch(folder=tmp_path, name="skips", **asked) as watch:
        assert all(map(torch.equal, script.train(watch.add).weights, weights))
    assert all(map(event_of, Written(tmp_path / "skips").events))


def test_between_the_steps_that_are_due_no_hook_is_there(tmp_path: Path) -> None:
    """No module has a hook between due steps, and evaluations in between are not measured."""
    net = Net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    seen = []
    with halfstep.watch(net, folder=tmp_path, name="it", headroom_every=3):
        for _ in range(12):
            seen.append(len(hooks._global_forward_hooks))
            assert not any(part._forward_hooks for part in net.modules())
            with torch.no_grad():
                net(torch.full((1, 8), 1e4))
            scaler.scale(net(torch.ones(1, 8)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen[6:] == [0, 0, 1, 0, 0, 1]  # some of the first steps are armed
    looks = Written(tmp_path / "it").of("headroom")
    assert all(module["activation"] < 100 for look in looks for module in look["modules"])


def test_one_that_fails_is_reported_once_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing measurement is reported once and stopped, and the others continue."""

    def failing(*_: Any) -> Any:
        raise MemoryError("no memory left")

    monkeypatch.setattr("halfstep.watching.exponents.Exponents.count", failing)
    with halfstep.watch(folder=tmp_path, name="it", **dict.fromkeys(ALL, 1)) as watch:
        Script().train(watch.add, steps=6)
    written = Written(tmp_path / "it")
    assert len(written.steps) == len(written.of("headroom")) == 6
    [failed] = written.of("failed_diagnosis")
    assert (failed["diagnosis"], failed["step"]) == ("histogram", 1)
    assert capsys.readouterr().err.count("histogram is disabled: MemoryError: no memory left") == 1


@pytest.mark.slow
def test_compiled_modules_are_not_recompiled(tmp_path: Path) -> None:
    """Compiled modules are not recompiled; their headroom is given up with the reason."""
    torch._dynamo.reset()
    net = Net()
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with halfstep.watch(compiled, folder=tmp_path, name="it", headroom_every=2):
        for _ in range(4):
            compiled(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    written = Written(tmp_path / "it")
    assert len(written.steps) == 4
    assert written.of("headroom") == []
    assert "compiled" in written.of("failed_diagnosis")[0]["error"]


@pytest.mark.parametrize("wrong", [-1, 0.5, "often"])
def test_an_invalid_interval_is_reported(
    tmp_path: Path, wrong: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid interval is reported with name, value and allowed values."""
    assert halfstep.watch(folder=tmp_path, layers_every=wrong).folder is None
    assert f"layers_every is {wrong!r}; allowed: a whole number" in capsys.readouterr().err


def test_norms_by_layer_come_by_default_and_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer norms are measured by default, some hundred times a run; 0 disables them."""
    monkeypatch.setattr(reader, "LAYERS_EVERY", 5)
    monkeypatch.setattr(reader, "LAYERS_DOUBLE_AT", 20)
    for name, options in (("default", {}), ("off", {"layers_every": 0})):
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with halfstep.watch(net, folder=tmp_path, name=name, **options):
            for _ in range(100):
                optimizer.zero_grad()
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        steps = [event["step"] for event in Written(tmp_path / name).of("layer_norms")]
        assert steps == ([5, 10, 15, 20, 30, 40, 60, 80] if name == "default" else [])
