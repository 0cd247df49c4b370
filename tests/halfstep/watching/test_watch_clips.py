"""Clips of gradients by norm and by value."""

import math
from collections.abc import Callable, Iterable
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from tests.halfstep.watching.watch_made import Written
from tests.marks import extended

CLIPS: dict[str, Callable[..., Any]] = {
    "norm": nn.utils.clip_grad_norm_,  # as a script that imported them before the watch
    "value": nn.utils.clip_grad_value_,
}


def clips_while_scaled(
    folder: Path,
    clip: Callable[[Iterable[Tensor], float], Any],
    *,
    is_unscaled: bool = False,
    has_scaler: bool = True,
) -> list[int]:
    """Return the steps of events caused by a clip in each of 5 steps."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
    with halfstep.watch(net, folder=folder) as watch:
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(4, 3)).square().mean()).backward()
            if is_unscaled:
                scaler.unscale_(optimizer)
            clip(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert watch.folder is not None
    events = Written(watch.folder).events
    return [each["step"] for each in events if each["event"] == "scaled_clip"]


@pytest.mark.parametrize(("kind", "first"), [("norm", 1), ("value", 2)])
def test_a_clip_of_scaled_gradients_is_reported(tmp_path: Path, kind: str, first: int) -> None:
    """A clip by value is reported from the second step on, because the first makes the
    optimizer known.
    """
    assert clips_while_scaled(tmp_path, CLIPS[kind])[0] == first


@pytest.mark.parametrize("has_scaler", [True, False])
def test_the_first_norm_is_that_before_the_clip(tmp_path: Path, has_scaler: bool) -> None:
    """The first norm is measured before the clip, although the optimizer is known only after it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    frozen = nn.Linear(2, 2)  # without gradients
    optimizer = torch.optim.SGD([*frozen.parameters(), *net.parameters()], lr=0.0)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
    norms = []
    with halfstep.watch(net, folder=tmp_path) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(4, 3)).square().mean()).backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            norms.append(norm.item() / scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
    assert watch.folder is not None
    assert Written(watch.folder).steps["grad_norm"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("right", [{"is_unscaled": True}, {"has_scaler": False}])
def test_a_clip_of_other_gradients_is_not(
    tmp_path: Path, kind: str, right: dict[str, bool]
) -> None:
    """A clip after unscale_, or in a loop without a scaler, is no mistake."""
    assert clips_while_scaled(tmp_path, CLIPS[kind], **right) == []


def test_a_clip_of_other_parameters_is_not(tmp_path: Path) -> None:
    """A clip of parameters of no optimizer is not reported."""
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)

    def clip(_: Iterable[Tensor], limit: float) -> None:
        nn.utils.clip_grad_value_(other, limit)

    assert clips_while_scaled(tmp_path, clip) == []
    assert other.grad.tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLIPS)
def test_a_compiled_clip_stays_one_graph(tmp_path: Path, kind: str) -> None:
    """A compiled clip stays one graph, compiled before or during the watch."""
    net = nn.Linear(3, 2)
    clip = torch.compile(CLIPS[kind], backend="eager", fullgraph=True)
    for is_watched in (True, False):
        net(torch.ones(4, 3)).square().sum().backward()
        if is_watched:
            with halfstep.watch(net, folder=tmp_path):
                clip(list(net.parameters()), 0.1)
        else:
            clip(list(net.parameters()), 0.1)
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        assert nn.utils.get_total_norm(gradients, torch.inf) <= 0.1 + 1e-6


@pytest.mark.parametrize(
    ("limit", "factors"),
    [(0.1, [1.0] * 4), (1e6, [1.0] * 4), (0.0, [1.0] * 4), (0.1, [float("inf"), 1.0, 1.0, 1.0])],
)
def test_norms_without_a_scaler_are_before_the_clip(
    tmp_path: Path, limit: float, factors: list[float]
) -> None:
    """Without a scaler norms are recorded before the clip, from the first step on."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    norms = []
    with halfstep.watch(net, folder=tmp_path) as watch:
        for factor in factors:
            optimizer.zero_grad()
            (net(torch.ones(4, 3)).square().mean() * factor).backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), limit).item())
            optimizer.step()
    assert watch.folder is not None
    recorded = Written(watch.folder).steps["grad_norm"].tolist()
    is_finite = [*map(math.isfinite, norms)]
    assert [*map(math.isfinite, recorded)] == is_finite
    assert [*compress(recorded, is_finite)] == pytest.approx([*compress(norms, is_finite)])


@pytest.mark.parametrize("passes", [1, 2])
def test_the_norm_of_a_dropped_iteration_is_not_that_of_the_first_step(
    tmp_path: Path, passes: int
) -> None:
    """The norm of a dropped iteration is not recorded for the first step."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with halfstep.watch(net, folder=tmp_path) as watch:
        (net(torch.ones(4, 3)).square().mean() * 1e6).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.zero_grad()
        for _ in range(passes):
            net(torch.ones(4, 3)).square().mean().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        optimizer.step()
    assert watch.folder is not None
    assert Written(watch.folder).steps["grad_norm"] == pytest.approx([norm])


@pytest.mark.parametrize("clips_each", [True, False])
def test_the_first_norm_of_several_optimizers_is_before_the_clip(
    tmp_path: Path, clips_each: bool
) -> None:
    """The first norm of several optimizers is that before the clip, joint or separate."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in (first, second)]
    both = [*first.parameters(), *second.parameters()]
    with halfstep.watch(first, second, folder=tmp_path) as watch:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(first(torch.ones(4, 3))).square().mean().backward()
            for clipped in [first.parameters(), second.parameters()] if clips_each else [both]:
                nn.utils.clip_grad_norm_(list(clipped), 1e-3)
            for optimizer in optimizers:
                optimizer.step()
    assert watch.folder is not None
    norms = Written(watch.folder).steps["grad_norm"].tolist()
    assert norms == pytest.approx([norms[-1]] * 3)
    assert norms[0] > 0.01


def test_counts_of_a_first_overflow_are_not_those_after_its_clip(tmp_path: Path) -> None:
    """A first overflow is counted before its clip, which turns each inf into NaN."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    with halfstep.watch(net, folder=tmp_path) as watch:
        scaler.scale(net(torch.ones(4, 3)).square().mean()).backward()
        assert net.weight.grad is not None
        net.weight.grad[0, 0] = float("inf")
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert watch.folder is not None
    [skip] = Written(watch.folder).of("scaler", "skip")
    [culprit] = skip["culprits"]
    assert culprit["name"] == "weight"
    assert culprit.get("nan", "x") == 0, culprit


def test_a_clip_of_gradients_of_different_precisions_is_watched(tmp_path: Path) -> None:
    """A clip over double- and half-precision gradients is watched."""
    nets = [nn.Linear(3, 2).double(), nn.Linear(3, 2).half()]
    parameters = [p for net in nets for p in net.parameters()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    with halfstep.watch(*nets, folder=tmp_path) as watch:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in optimizers:
                optimizer.step()
    assert watch.folder is not None
    assert Written(watch.folder).of("failed_diagnosis") == []


@pytest.mark.parametrize("how", ["plain", "unscaled", "scaled", "fused", "float64", "half"])
@pytest.mark.parametrize("limit", [0.1, *extended([1e6])])
def test_the_norm_after_a_clip_is_recorded(tmp_path: Path, how: str, limit: float) -> None:
    """The norm after a clip is recorded from the first step on, and equals that before if
    nothing was clipped.
    """
    torch.manual_seed(0)
    dtype = {"float64": torch.float64, "half": torch.bfloat16}.get(how, torch.float32)
    net = nn.Linear(3, 2, dtype=dtype)
    frozen = nn.Linear(2, 2)  # without gradients
    parameters = [*net.parameters(), *frozen.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0, fused=how == "fused")
    scaler = GradScaler("cpu", init_scale=8.0, enabled=how in ("unscaled", "scaled", "fused"))
    norms = []
    with halfstep.watch(net, folder=tmp_path) as watch:
        for step in range(6):
            optimizer.zero_grad()
            x = torch.ones(4, 3, dtype=dtype) * (step + 1)
            scaler.scale(net(x).square().mean()).backward()
            if how in ("unscaled", "fused"):
                scaler.unscale_(optimizer)
            factor = scaler.get_scale() if how == "scaled" else 1.0
            nn.utils.clip_grad_norm_(parameters, limit)
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            norms.append(nn.utils.get_total_norm(gradients).item() / factor)
            scaler.step(optimizer)
            scaler.update()
    assert watch.folder is not None
    steps = Written(watch.folder).steps
    tolerance = 1e-2 if how == "half" else 1e-5
    assert steps["grad_norm_clipped"] == pytest.approx(norms, rel=tolerance)
    is_cut = (steps["grad_norm_clipped"] < steps["grad_norm"]).all()
    assert is_cut == (limit == 0.1), steps


@pytest.mark.parametrize("clips_each", [True, False])
@pytest.mark.parametrize("has_scaler", [True, False])
def test_the_norm_after_clips_of_several_optimizers_is_recorded(
    tmp_path: Path, clips_each: bool, has_scaler: bool
) -> None:
    """The norm after clips is recorded for several optimizers, clipped together or not."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in (first, second)]
    both = [*first.parameters(), *second.parameters()]
    scaler = GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
    norms = []
    with halfstep.watch(first, second, folder=tmp_path) as watch:
        for _ in range(12):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(second(first(torch.ones(4, 3))).square().mean()).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if clips_each:
                nn.utils.clip_grad_norm_(first.parameters(), 1e-2)
                nn.utils.clip_grad_norm_(second.parameters(), 2e-2)
            else:
                nn.utils.clip_grad_norm_(both, 1e-2)
            gradients = [p.grad for p in both if p.grad is not None]
            norms.append(nn.utils.get_total_norm(gradients).item())
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert watch.folder is not None
    assert Written(watch.folder).steps["grad_norm_clipped"] == pytest.approx(norms, rel=1e-4)


def test_a_limit_that_changes_counts_from_its_step_on(tmp_path: Path) -> None:
    """A changed limit applies from its step on; several clips of a step are combined."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    limits: list[list[float]] = [[0.1], [0.2], [], [0.4, 0.2], [0.2, 0.4], [0.3]]
    with halfstep.watch(net, folder=tmp_path) as watch:
        for own in limits:
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            for limit in own:
                nn.utils.clip_grad_norm_(net.parameters(), limit)
            optimizer.step()
    assert watch.folder is not None
    steps = Written(watch.folder).steps
    expected = [
        min(own, default=norm) for own, norm in zip(limits, steps["grad_norm"], strict=True)
    ]
    assert steps["grad_norm_clipped"] == pytest.approx(expected, rel=1e-4)
