"""`halfstep.watch` compared with reference loops, which may wait for the device to measure."""

import gc
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import optimizer as optimizer_module

import halfstep
from halfstep.recording import ring
from halfstep.session import active_run, run_upload
from halfstep.shadow import mode as shadow_mode
from halfstep.telemetry import uploader
from halfstep.telemetry.plain_json import safe_repr
from halfstep.watching import clip_wrappers, hooks, listener
from halfstep.watching.scaler_calls import PRIVATE
from tests import preloaded, warm
from tests.diagnosis.trial import unreadable
from tests.halfstep.watching.watch_made import (
    SCRIPTS,
    STEPS,
    Net,
    Script,
    Written,
    equals_the_reference_loop,
)
from tests.marks import extended, looped
from tests.spool_made import event_of

METHODS = ("scale", "unscale_", "_check_inf_per_device", "update")


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch and Python after a test."""
    monkeypatch.delenv("HALFSTEP_MODE", raising=False)
    before = [vars(GradScaler)[name] for name in METHODS]
    others = sys.excepthook, signal.getsignal(signal.SIGTERM), torch.Tensor.backward
    yield
    if active_run.active is not None:
        active_run.active.finish()
    assert [vars(GradScaler)[name] for name in METHODS] == before
    assert (sys.excepthook, signal.getsignal(signal.SIGTERM), torch.Tensor.backward) == others
    assert not optimizer_module._global_optimizer_post_hooks


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_step_is_the_reference_loops(tmp_path: Path, name: str) -> None:
    """Losses, scales, skips, culprits and weights equal the reference loop's."""
    equals_the_reference_loop(SCRIPTS[name], tmp_path)


@pytest.mark.parametrize("name", ["unfused", "fused", "two optimizers"])
def test_a_device_that_the_host_cannot_read_gives_the_same_result(
    tmp_path: Path, name: str
) -> None:
    """Skips on a device are known only when its rows arrive."""
    with unreadable(), halfstep.watch(folder=tmp_path, name="it") as watch:
        truth = SCRIPTS[name].train(watch.add)
    written = Written(tmp_path / "it").truth()
    assert (written.scales, written.skipped) == (truth.scales, truth.skipped)
    assert written.culprits == truth.culprits
    assert written.losses == pytest.approx(truth.losses, rel=1e-6)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("name", ["SGD", "fused", "fused and clipped"])
def test_another_default_device_changes_nothing(tmp_path: Path, name: str) -> None:
    """A script's other default device affects its own tensors, and none of Halfstep's."""
    every = {"histogram_every": 1, "layers_every": 1, "headroom_every": 1}
    bare = SCRIPTS[name].train()
    with torch.device("meta"), halfstep.watch(folder=tmp_path, name="it", **every) as watch:
        watched = SCRIPTS[name].train(watch.add)
    written = Written(tmp_path / "it").truth()
    assert all(map(torch.equal, watched.weights, bare.weights))
    assert (written.scales, written.skipped) == (bare.scales, bare.skipped)
    assert written.culprits == bare.culprits
    assert not Written(tmp_path / "it").of("failed_diagnosis")


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the default dtype of new tensors."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype", "nothing_compiled")
@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize(
    "default_dtype", [torch.float64, torch.bfloat16, torch.float16], indirect=True
)
def test_another_default_dtype_changes_nothing(tmp_path: Path, has_scaler: bool) -> None:
    """Loss, scale and norm are recorded in fp32, for any default dtype of the script."""
    every = {"histogram_every": 1, "layers_every": 1, "headroom_every": 1}
    net = torch.nn.Linear(4, 1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, enabled=has_scaler)
    losses, norms = [], []
    with halfstep.watch(net, folder=tmp_path, name="it", **every):
        for _ in range(8):
            loss = net(torch.randn(3, 4, dtype=torch.float32)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            squares = [weight.grad.double().square().sum() for weight in net.parameters()]
            losses.append(loss.item())
            norms.append(float(sum(squares) ** 0.5))
            scaler.step(optimizer)
            scaler.update()
    written = Written(tmp_path / "it")
    assert written.steps["loss"].tolist() == losses
    assert written.steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-6)
    if has_scaler:
        assert set(written.steps["scale"].tolist()) == {2.0**17}
    assert not written.of("failed_diagnosis")
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_captured_step_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured, no code of the watch runs; the steps around it are
    recorded.
    """
    is_capturing = False
    for module in (hooks, listener, clip_wrappers, shadow_mode):
        monkeypatch.setattr(module, "cuda", SimpleNamespace(_initialized=True))
        monkeypatch.setattr(module, "is_capturing", lambda: is_capturing)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for number in range(5):
            is_capturing = number == 2
            optimizer.zero_grad()
            loss = net(torch.ones(2, 8)).square().mean()
            scaler.scale(loss * (number + 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        is_capturing = False
    steps = Written(tmp_path / "it").steps
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert (np.diff(steps["loss"]) > 0).all()


@pytest.mark.parametrize("fused", [False, True])
def test_norms_are_unscaled_and_before_the_clip(tmp_path: Path, fused: bool) -> None:
    """Norms are those of clip_grad_norm_, whether the loop or a fused optimizer unscales."""
    for clip in (1e-3, None):
        with halfstep.watch(folder=tmp_path, name=f"clip-{clip}") as watch:
            truth = Script(fused=fused, clip=clip).train(watch.add, steps=12)
        steps = Written(tmp_path / f"clip-{clip}").steps
        applied = steps["flags"] == 0
        expected = np.array(truth.norms) / (1 if clip else steps["scale"])
        assert steps["grad_norm"][applied] == pytest.approx(expected[applied], rel=1e-4)


def bf16(watch: Any = None, *, fused: bool = False, epochs: int = 20) -> list[torch.Tensor]:
    """Train without a scaler, with a clip and a schedule."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if watch:
        watch.add(net)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_without_a_scaler_is_watched_by_its_optimizer(tmp_path: Path, fused: bool) -> None:
    """In bf16 the loss of the backward pass, the norm and the learning rate are recorded, with
    scale 1 and no skips.
    """
    bare = bf16(fused=fused)
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watched = bf16(watch, fused=fused)
    assert all(map(torch.equal, bare, watched))
    steps = Written(tmp_path / "it").steps
    assert steps["step"].tolist() == list(range(1, 21))
    assert steps["loss"].tolist() == [loss.item() for loss in bare[:20]]
    assert steps["lr"] == pytest.approx([1e-2 * 0.9**i for i in range(20)])
    assert (steps["scale"] == 1).all()
    assert (steps["flags"] == 0).all()
    assert (steps["grad_norm"] > 0).all()


def test_a_rate_on_a_device_is_that_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded rate is that of the step, although a schedule changes it in place afterwards."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    weight, rate = nn.Parameter(torch.ones(2)), torch.tensor(0.5)
    optimizer = torch.optim.SGD([weight], lr=rate)
    with halfstep.watch(folder=tmp_path, name="it"):
        for _ in range(3):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            rate /= 2
    assert Written(tmp_path / "it").steps["lr"].tolist() == [0.5, 0.25, 0.125]


class AcceleratedOptimizer:
    """Optimizer as Accelerate's `prepare` returns it: only the inner optimizer's steps are
    observed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


class Lookahead(torch.optim.SGD):
    """Optimizer that steps through another one, and is observed itself."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.optimizer.param_groups)


@pytest.mark.parametrize("wrap", [AcceleratedOptimizer, Lookahead])
def test_a_wrapped_optimizer_is_recorded(tmp_path: Path, wrap: Callable[..., Any]) -> None:
    """A wrapped optimizer is recorded under the name of the one that torch's hooks report."""
    weight = nn.Parameter(torch.full((2,), 2.0))
    inner = torch.optim.SGD([weight], lr=0.1)
    optimizer = wrap(inner if wrap is AcceleratedOptimizer else [weight])
    with halfstep.watch(folder=tmp_path, name="it", optimizers=[optimizer]):
        for factor in (1.0, math.inf, 1.0):
            scaler = GradScaler("cpu", init_scale=2.0)
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer if wrap is Lookahead else inner)
            scaler.update()
            inner.zero_grad()
    written = Written(tmp_path / "it")
    assert len(written.steps) == 3
    [skip] = [event for event in written.of("scaler") if event["kind"] == "skip"]
    assert skip["optimizer"] == ("SGD" if wrap is AcceleratedOptimizer else "Lookahead")


def test_gradients_that_are_sparse_or_missing_are_measured(tmp_path: Path) -> None:
    """In host memory rows of an embedding, half precision and missing gradients are read
    unchanged.
    """
    table, half = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    unused, alone = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    watched = torch.optim.SGD([*table.parameters(), half, unused], lr=0.1)
    with halfstep.watch(folder=tmp_path, name="it", optimizers=[watched]):
        for size in (3.0, 4.0):
            watched.zero_grad()
            (table(torch.tensor([1, 3])).sum() * size + half.sum() * 0.5 + alone.sum()).backward()
            watched.step()
    assert Written(tmp_path / "it").steps["grad_norm"].tolist() == pytest.approx(
        [(4 * size**2 + 2 * 0.5**2) ** 0.5 for size in (3.0, 4.0)]
    )


def test_measurements_belong_to_their_row(tmp_path: Path) -> None:
    """An optimizer that no scaler steps is measured in the rows of both scalers in turn."""
    scaled, plain = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, other = torch.amp.GradScaler("cpu", 8.0), torch.amp.GradScaler("cpu", 8.0)
    by_scaler = torch.optim.SGD([scaled], lr=0.0)
    alone = torch.optim.SGD([plain], lr=0.0)

    def forward(scaler: torch.amp.GradScaler, size: float) -> None:
        for each in (scaled, plain):
            each.grad = None
        scaler.scale((scaled * 3).sum()).backward()
        plain.grad = torch.tensor([size])
        scaler.step(by_scaler)
        alone.step()

    with halfstep.watch(folder=tmp_path, name="it"):
        forward(first, 4.0)
        forward(other, 12.0)
        first.update()
        other.update()
    assert Written(tmp_path / "it").steps["grad_norm"].tolist() == pytest.approx([5.0, 153**0.5])


def test_parameters_that_are_added_within_a_step_end_no_watching(tmp_path: Path) -> None:
    """An optimizer to which parameters are added within a step, after it was measured, stays
    watched.
    """
    weight, scaler = nn.Parameter(torch.ones(1)), torch.amp.GradScaler("cpu", 8.0)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with halfstep.watch(folder=tmp_path, name="it", layers_every=1):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((weight * 3).sum()).backward()
            scaler.unscale_(optimizer)
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            scaler.step(optimizer)
            scaler.update()
    steps = Written(tmp_path / "it").steps
    assert steps["grad_norm"].tolist()[1:] == [3.0, 3.0]


def test_a_step_without_a_scaler_is_one_of_each_optimizer(tmp_path: Path) -> None:
    """Without a scaler a row closes when both named optimizers have stepped."""
    net = Net()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.body, net.head)]
    with halfstep.watch(net, optimizers=pair, folder=tmp_path, name="it"):
        for _ in range(3):
            net(torch.ones(1, 8)).sum().backward()
            for optimizer in pair:
                optimizer.step()
    assert len(Written(tmp_path / "it").steps) == 3


def test_a_disabled_scaler_is_none(tmp_path: Path) -> None:
    """A loop with GradScaler(enabled=False) is watched by its optimizer's hook."""
    net, scaler = Net(), GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for _ in range(3):
            scaler.scale(net(torch.ones(1, 8)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = Written(tmp_path / "it").steps
    assert len(steps) == 3
    assert np.isfinite(steps["loss"]).all()


def test_a_scale_set_by_hand_is_reported_as_set(tmp_path: Path) -> None:
    """A scale set by hand is neither a growth nor a backoff, instead of an update or after one."""
    net, scaler = Net(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for step in range(1, 5):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(1, 8)).sum()).backward()
            scaler.step(optimizer)
            scaler.update(64.0 if step == 2 else None)
            if step == 3:
                scaler.update(32.0)
    written = Written(tmp_path / "it")
    assert written.steps["scale"].tolist() == [8, 8, 64, 32]
    result = [(e["kind"], e["step"], e["scale_after"]) for e in written.of("scaler")]
    assert result == [("set", 3, 64), ("set", 4, 32)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_that_advances_in_skipped_steps_is_reported(tmp_path: Path) -> None:
    """scheduler.step() after each attempt is reported, unless it waits for the optimizer."""
    for waits in (False, True):
        net, scaler = Net(), GradScaler("cpu", init_scale=2.0**30)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        with halfstep.watch(net, folder=tmp_path, name=f"waits-{waits}"):
            for _ in range(20):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = net(torch.ones(4, 8)).square().mean()
                scale = scaler.get_scale()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if not waits or scaler.get_scale() >= scale:
                    schedule.step()
    for waits in (False, True):
        written = Written(tmp_path / f"waits-{waits}")
        skipped = len(written.of("scaler", "skip"))
        assert skipped >= 3
        result = written.of("schedule")
        if waits:
            assert result == []
        else:
            assert result[0]["advanced"] == result[0]["skipped"]
            assert skipped / 2 < result[-1]["advanced"] <= skipped


def test_a_later_optimizer_changes_the_layout_of_rows(tmp_path: Path) -> None:
    """A parameter group added later changes the layout of rows, and no earlier step is lost."""
    net, scaler = Net(), GradScaler("cpu", init_scale=8.0)
    first = torch.optim.SGD(net.head.parameters(), lr=1e-3)
    second = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    [extra] = second.param_groups[0]["params"]
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for step in range(1, 7):
            if step == 5:
                first.add_param_group({"params": list(net.body.parameters())})
            used = [first] if step < 3 else [first, second]
            loss = net(torch.ones(1, 8)).sum() * (1 if step < 6 else float("inf")) + extra.sum()
            scaler.scale(loss).backward()
            for optimizer in used:
                scaler.step(optimizer)
            scaler.update()
    written = Written(tmp_path / "it")
    assert written.steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    [skip] = written.of("scaler", "skip")
    assert [each["name"] for each in skip["culprits"]] == [n for n, _ in net.named_parameters()]


def test_a_finding_about_the_loss_precedes_one_about_scaling(tmp_path: Path) -> None:
    """loss() replaces the recorded loss, and several calls of a step are averaged."""
    net, scaler = Net(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with halfstep.watch(net, folder=tmp_path, name="it") as watch:
        for _ in range(2):
            loss = net(torch.ones(1, 8)).sum()
            scaler.scale(loss).backward()
            watch.loss(torch.tensor(2.0))
            watch.loss(4)
            scaler.step(optimizer)
            scaler.update()
    assert Written(tmp_path / "it").steps["loss"].tolist() == [3, 3]


@pytest.mark.slow
def test_compiled_modules_keep_their_names_and_their_bits(tmp_path: Path) -> None:
    """Culprits have the plain names with torch.compile of the model and of a whole step."""
    net = Net()
    compiled = torch.compile(net, backend="eager")
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), GradScaler("cpu")

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(compiled(x).sum())

    with halfstep.watch(compiled, folder=tmp_path, name="it"):
        for factor in (1.0, float("inf")):
            (forward(torch.ones(1, 8)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    written = Written(tmp_path / "it")
    assert len(written.steps) == 2
    [skip] = written.of("scaler", "skip")
    assert {each["name"] for each in skip["culprits"]} <= {n for n, _ in net.named_parameters()}


def test_numbers_texts_images_and_tables_are_logged(tmp_path: Path) -> None:
    """Numbers become metrics of their step, everything else a file; an error is reported once."""
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        for _ in range(2):
            watch.log({"val/loss": 0.5, "tensor": torch.tensor(2), "odd": object()}, step=7)
        watch.log({"a/text": "hello", "image": pixels, "table": [{"a": 1}, {"b": 2}]}, step=7)
    written = Written(tmp_path / "it")
    metrics = {(e["name"], e["step"], e["value"]) for e in written.of("metric")}
    assert metrics == {("val/loss", 7, 0.5), ("tensor", 7, 2.0)}
    files = {e["name"]: tmp_path / "it" / e["path"] for e in written.of("artifact")}
    assert files["a-text.txt"].read_text() == "hello"
    assert files["table.csv"].read_text().split() == ["a,b", "1,", ",2"]
    from PIL import Image

    assert (np.asarray(Image.open(files["image.png"])) == pixels).all()


def test_a_tensor_or_an_array_of_one_number_is_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor or array of one element is a number; larger ones are rejected by their shape."""
    ones = {"t": torch.ones(1, requires_grad=True), "tt": torch.ones(1, 1), "a": np.ones(1)}
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log(
            ones | {"three": torch.ones(3), "none": np.ones(0), "deep": torch.ones(2, 2, 2, 2, 2)}
        )
        watch.loss(np.ones(1))  # type: ignore[arg-type]
    result = Written(tmp_path / "it").of("metric")
    assert [(each["name"], each["value"]) for each in result] == [("t", 1), ("tt", 1), ("a", 1)]
    allowed = "cannot be logged; allowed: a number, a text, a picture, a figure, an array or tensor"
    _watching, *lines = capsys.readouterr().err.splitlines()
    for line, kind in zip(
        lines,
        ["a tensor of shape (3,)", "an array of shape (0,)", "a tensor of shape (2, 2, 2, 2, 2)"],
        strict=True,
    ):
        assert f" is not logged: {kind} {allowed}" in line


def test_the_last_file_of_a_name_in_a_step_counts(tmp_path: Path) -> None:
    """The last of several files with one name and step is kept."""
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        for text in ("first", "last"):
            watch.log({"text": text}, step=0)
    assert (tmp_path / "it/artifacts/step-00000000/text.txt").read_text() == "last"


def test_pixels_of_any_kind_are_pictures(tmp_path: Path) -> None:
    """Floats in 0 … 1, booleans, tensors with channels first and figures become PNG."""
    from PIL import Image

    class Figure:
        """A figure with matplotlib's method."""

        def savefig(self, file: Any, format: str) -> None:  # noqa: A002 - matplotlib's word
            Image.new("RGB", (5, 4)).save(file, format)

    wide = torch.linspace(0, 1, 3 * 6 * 7).reshape(3, 6, 7)
    pictures = {
        "floats": np.array([[0.0, 0.5], [1.0, np.nan]]),
        "mask": torch.tensor([[True, False]]),
        "tensor": wide.half(),
        "figure": Figure(),
    }
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log(pictures)
    files = {
        e["name"]: tmp_path / "it" / e["path"] for e in Written(tmp_path / "it").of("artifact")
    }
    seen = {name: np.asarray(Image.open(path)) for name, path in files.items()}
    assert seen["floats.png"].tolist() == [[0, 128], [255, 0]]
    assert seen["mask.png"].tolist() == [[255, 0]]
    assert seen["tensor.png"].shape == (6, 7, 3)
    assert seen["figure.png"].shape == (4, 5, 3)


def test_histograms_and_sounds_are_files(tmp_path: Path) -> None:
    """A histogram has counts between the lowest and the highest value; audio is stored as RIFF."""
    import wave

    values = torch.tensor([0.0, 1.0, 1.0, 2.0, float("nan")])
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log({"sizes": halfstep.Histogram(values, bins=2)})
        watch.log({"tone": halfstep.Audio(np.array([0.0, 1.0, -2.0]), rate=8000)})
    files = {
        e["name"]: tmp_path / "it" / e["path"] for e in Written(tmp_path / "it").of("artifact")
    }
    histogram = json.loads(files["sizes.histogram.json"].read_text())
    assert histogram == {"lowest": 0.0, "highest": 2.0, "counts": [1, 3], "nonfinite": 1}
    with wave.open(str(files["tone.wav"])) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (8000, 1, 3)
        assert np.frombuffer(sound.readframes(3), "<i2").tolist() == [0, 32767, -32767]


def test_values_that_cannot_be_shown_are_reported_and_not_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of a wrong shape, type or size, or an error of the plotting library, prints one
    line each, and the loop continues.
    """

    class Broken:
        def savefig(self, *_: Any, **__: Any) -> None:
            raise KeyError("no font")

    monkeypatch.setattr("halfstep.session.logged_values.MOST_BYTES", 2**20)
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log({"shape": np.zeros((2, 2, 7), np.uint8), "type": np.full((2, 2), 1000)})
        watch.log({"long": "x" * 2**21, "figure": Broken()})
        watch.log({"bins": halfstep.Histogram([1.0], bins=0), "sound": halfstep.Audio([], rate=0)})
        watch.log({"good": 1.0})
    written = Written(tmp_path / "it")
    assert written.of("artifact") == []
    assert len(written.of("metric")) == 1
    result = capsys.readouterr().err
    for name in ("shape", "type", "long", "figure", "bins", "sound"):
        assert f"halfstep: {name} is not logged: " in result
    assert "it is 2 MiB as .txt; allowed: 1 MiB" in result


def test_an_invalid_number_is_reported_and_others_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that are too large, complex, without a value or in no dictionary are reported."""
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log({"big": 10**400, "complex": torch.tensor(1 + 1j)})
        watch.log({"meta": torch.ones((), device="meta")})
        watch.log({"n" * 9000: 1.0})
        watch.log([1.0])  # type: ignore[arg-type]
        watch.log({"good": 1.0})
    [good] = Written(tmp_path / "it").of("metric")
    assert good["name"] == "good"
    result = capsys.readouterr().err
    assert max(map(len, result.splitlines())) < 1000
    for name in ("big", "complex", "meta", "n" * 100):
        assert f"halfstep: {name} is not logged: " in result
    assert (
        "halfstep: log is ignored: it got [1.0]; allowed: a dictionary of values by name" in result
    )


UNLOGGED: list[tuple[dict[Any, Any], str]] = [
    ({"big": -(10**400)}, "big is not logged: it is -1000"),
    ({"complex": torch.tensor(1j)}, "complex is not logged: it is tensor(0.+1.j); allowed: a numb"),
    (
        {"word": np.array("abc")},
        "word is not logged: an array of shape () cannot be logged; allowed: a number",
    ),
    (
        {" \n": 1.0},
        r"a value is not logged: its name is ' \n'; allowed: text without NUL and lone ",
    ),
    ({"": "text"}, "a value is not logged: its name is ''; allowed: text without NUL and lone sur"),
    (
        {5: "text"},
        "a value is not logged: its name is 5; allowed: text without NUL and lone surrog",
    ),
    ({"n" * 201: 1.0}, f"{'n' * 100} is not logged: metric '{'n' * 199}… at step 0: name is "),
]


@pytest.mark.parametrize(("values", "said"), UNLOGGED)
def test_rejected_values_are_named_with_the_allowed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], said: str
) -> None:
    """Rejected values are named in one line with the allowed ones, and the others recorded."""
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log(values | {"good": 1.0})
    written = Written(tmp_path / "it")
    assert [event["name"] for event in written.of("metric")] == ["good"]
    assert written.of("artifact") == []
    _watching, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: {said}")
    assert "; allowed: " in line


def test_a_checkpoint_is_registered_with_size_and_digest(tmp_path: Path) -> None:
    """A registered checkpoint is linked in the run's folder, with size and digest."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"weights")
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.checkpoint(path)
        watch.checkpoint(tmp_path / "absent.pt")
    [event] = Written(tmp_path / "it").of("checkpoint")
    [file] = event["files"]
    assert (file["size_bytes"], file["kind"]) == (7, "checkpoint")
    assert file["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert (tmp_path / "it" / file["path"]).samefile(path)


def test_the_folder_says_all_of_the_run(tmp_path: Path) -> None:
    """The run's folder has name, configuration, project, tags, versions, host and outcome."""
    from argparse import Namespace

    config = Namespace(lr=1e-3, path=Path("data"), deep={"a": float("nan")})
    with halfstep.watch(
        folder=tmp_path, name="my run/1", config=config, project="p", tags=["a"]
    ) as watch:
        bf16(watch, epochs=3)
    run = json.loads((tmp_path / "my-run-1" / "run.json").read_text())
    assert (run["name"], run["project"], run["tags"]) == ("my run/1", "p", ["a"])
    assert run["config"] == {"lr": 1e-3, "path": "data", "deep": {"a": "NaN"}}
    [attempt] = run["attempts"]
    assert (
        attempt["versions"]["torch"] == torch.__version__.partition("+")[0] or attempt["versions"]
    )
    outcome = json.loads((tmp_path / "my-run-1" / "outcome-1.json").read_text())
    assert (outcome["status"], outcome["step"], outcome["error"]) == ("finished", 3, None)


def test_whole_numbers_that_no_browser_holds_are_texts_of_the_configuration(
    tmp_path: Path,
) -> None:
    """Integers beyond a browser's range become texts, so that a 64-bit seed is not rejected."""
    config = {"seed": 2**64 - 1, "least": [-(2**63)], "exact": 2**53, "long": 10**5000}
    halfstep.watch(folder=tmp_path, name="it", config=config).finish()
    assert json.loads((tmp_path / "it" / "run.json").read_text())["config"] == {
        "seed": "18446744073709551615",
        "least": ["-9223372036854775808"],
        "exact": 2**53,
        "long": "of type int",
    }


@pytest.mark.parametrize("how", ["run", "file"])
def test_a_resumed_run_is_the_next_attempt(tmp_path: Path, how: str) -> None:
    """A run is resumed by run= or by a file in its folder, and its steps continue."""
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        bf16(watch, epochs=5)
    if how == "file":
        (tmp_path / "resume").write_text("it\n")
    again = {"run": "it"} if how == "run" else {}
    with halfstep.watch(folder=tmp_path, **again) as watch:
        bf16(watch, epochs=2)
    with halfstep.watch(folder=tmp_path, **again) as watch:
        watch.resume(3)
        bf16(watch, epochs=1)
    written = Written(tmp_path / "it")
    assert written.steps["step"].tolist() == [1, 2, 3, 4, 5, 6, 7, 4]
    assert [(e["step"], e["exact"]) for e in written.of("resumed")] == [(5, False), (3, False)]
    attempts = json.loads((tmp_path / "it" / "run.json").read_text())["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == [1, 2, 3]


@pytest.mark.parametrize("clock_set", [timedelta(), timedelta(days=-1)])
def test_the_time_of_a_resumed_run_continues(tmp_path: Path, clock_set: timedelta) -> None:
    """The time of a resumed run counts from the first start, and never goes back with the
    machine's clock.
    """
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        bf16(watch, epochs=2)
    described = tmp_path / "it" / "run.json"
    run = json.loads(described.read_text())
    run["started"] = (datetime.now(UTC) - timedelta(hours=1) - clock_set).isoformat()
    described.write_text(json.dumps(run))
    with halfstep.watch(folder=tmp_path, run="it") as watch:
        bf16(watch, epochs=2)
        watch.log({"accuracy": 0.5})
    written = Written(tmp_path / "it")
    elapsed = written.steps["elapsed_ms"].tolist()
    assert elapsed == sorted(elapsed)
    assert elapsed[2] >= (0 if clock_set else 3_600_000)
    # Logged while the last step is under way: it ends with the watch.
    assert elapsed[-2] <= written.of("metric")[0]["elapsed_ms"] <= elapsed[-1]


@pytest.mark.parametrize("how", ["run", "file"])
def test_an_unknown_run_to_continue_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """An unknown run to continue is reported once and becomes a new run."""
    (tmp_path / "resume").write_text("mien\n")
    run = "mien" if how == "run" else None
    for _ in range(2):
        halfstep.watch(folder=tmp_path, run=run).finish()
    line, *watching = capsys.readouterr().err.splitlines()
    assert line == f"halfstep: there is no run 'mien' in {tmp_path}; starting a new one"
    assert len(watching) == 2


@pytest.mark.parametrize("run", ["../off", "off ", "-off", "o" * 100 + "ff"])
def test_only_the_named_run_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    """A run name without a folder begins a new run once, and continues it from then on."""
    for name in ("off", "o" * 100):
        halfstep.watch(folder=tmp_path, name=name).finish()
    capsys.readouterr()
    for name in ("named otherwise", None):
        again = halfstep.watch(folder=tmp_path, run=run, name=name)
        again.finish()
        assert again.folder
        assert again.folder.parent == tmp_path
        assert again.folder.name.endswith("-2")
    assert len(list(again.folder.glob("outcome-*.json"))) == 2
    assert [path.name for path in tmp_path.glob("o*/outcome-2.json")] == ["outcome-2.json"]
    line, *watching = capsys.readouterr().err.splitlines()
    assert line == f"halfstep: there is no run {safe_repr(run)} in {tmp_path}; starting a new one"
    assert len(watching) == 2


def test_a_run_is_continued_by_its_name_or_its_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is continued by its name or its folder's, also if no folder can have the name."""
    halfstep.watch(folder=tmp_path, name="my run/1").finish()
    for run in ("my run/1", "my-run-1"):
        halfstep.watch(folder=tmp_path, run=run).finish()
    assert (tmp_path / "my-run-1" / "outcome-3.json").exists()
    assert "there is no run" not in capsys.readouterr().err


def test_a_resumed_run_is_configured_again(tmp_path: Path) -> None:
    """A resumed run's new configuration replaces the keys that it names."""
    for again, config in (
        ({"name": "it"}, {"lr": 0.1, "seed": 1, "model": {"depth": 2}}),
        ({"run": "it"}, {"lr": 0.2, "model": {"width": 8}}),
        ({"run": "it"}, None),
    ):
        halfstep.watch(folder=tmp_path, config=config, mode="offline", **again).finish()
    described = json.loads((tmp_path / "it" / "run.json").read_text())
    assert described["config"] == {"lr": 0.2, "seed": 1, "model": {"width": 8}}


def test_an_invalid_configuration_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid configuration is reported, and the run keeps the valid one."""
    with halfstep.watch(folder=tmp_path, name="it", config="lr=0.1") as watch:
        watch.configure({"lr": 0.2})
        watch.configure([0.1])
    assert json.loads((tmp_path / "it" / "run.json").read_text())["config"] == {"lr": 0.2}
    result = capsys.readouterr().err
    assert "halfstep: config is ignored: it is 'lr=0.1'; allowed: a dictionary" in result
    assert "halfstep: configure is ignored: it is [0.1]; allowed: a dictionary" in result


def test_runs_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    """A second run of the same name gets a folder with a number."""
    for _ in range(2):
        halfstep.watch(folder=tmp_path, name="it").finish()
    assert {path.name for path in tmp_path.iterdir()} == {"it", "it-2"}


@pytest.mark.slow
def test_the_folder_of_runs_hides_no_module_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script next to the folder of runs imports our modules, not the folder."""
    monkeypatch.chdir(tmp_path)
    halfstep.watch(name="it").finish()
    assert Path("halfstep-runs/it/outcome-1.json").exists()
    Path("again.py").write_text("import halfstep; print(halfstep.watch.__name__)")
    again = subprocess.run([sys.executable, "again.py"], capture_output=True, text=True, check=True)
    assert again.stdout == "watch\n"


def test_watching_twice_is_watching_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call of `watch` adds modules and reports a differing run; a second `finish` does
    nothing.
    """
    first = halfstep.watch(folder=tmp_path, name="it")
    assert halfstep.watch(Net(), folder=tmp_path) is first
    place = f"the run is in {tmp_path / 'it'}"
    begun = f"halfstep: watching; {place}; `halfstep show {tmp_path}` opens it\n"
    assert capsys.readouterr().err == begun
    halfstep.watch(Net(), folder=tmp_path, name="it")  # as a notebook's cell, run again
    halfstep.watch(Net(), folder=tmp_path, run="it")
    wrong: Any = np.ones(2)
    halfstep.watch(Net(), folder=tmp_path, name=wrong, run=wrong)
    second = halfstep.watch(Net(), folder=tmp_path, name="other")
    assert second is first
    first.finish()
    second.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    stated = f"{tmp_path / 'it'} continues; call `finish()` before starting another run"
    assert capsys.readouterr().err == f"halfstep: {stated}\n"


def test_without_the_service_the_upload_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the service, the message names `halfstep upload` instead of `halfstep show`."""
    monkeypatch.setattr("halfstep.session.run_upload.SERVICE", "halfstep-absent")
    halfstep.watch(folder=tmp_path, name="it").finish()
    folder = tmp_path / "it"
    upload = f"`halfstep upload {folder}` uploads it to a server"
    assert capsys.readouterr().err == f"halfstep: watching; the run is in {folder}; {upload}\n"


def test_disabled_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch disabled by mode, environment or as a further rank writes nothing and has all
    methods.
    """
    cases: list[tuple[dict[str, str], Any]] = [
        ({}, "disabled"),
        ({"HALFSTEP_MODE": "disabled"}, "auto"),
        ({"RANK": "1"}, "auto"),
    ]
    for environment, mode in cases:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "excepthook", sys.excepthook)  # a further rank reports its exception
            for name, value in environment.items():
                patch.setenv(name, value)
            with halfstep.watch(Net(), folder=tmp_path, mode=mode) as watch:
                watch.log({"a": 1})
                watch.loss(1.0)
                watch.checkpoint(tmp_path)
            assert watch.folder is None
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_argument_ends_no_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unwatchable argument is reported in one line."""
    monkeypatch.setenv("HALFSTEP_MODE", "sometimes")
    assert halfstep.watch(folder=tmp_path).folder is None
    monkeypatch.delenv("HALFSTEP_MODE")
    (tmp_path / "file").touch()
    assert halfstep.watch(folder=tmp_path / "file").folder is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "the mode is 'sometimes'; allowed: auto, offline, disabled" in lines[0]


@pytest.mark.parametrize(
    ("argument", "given"),
    [("folder", 5), ("run", 7), ("run", ""), ("run", " "), ("run", "r" * 201)],
)
def test_where_it_is_written_is_not_guessed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argument: str,
    given: Any,
) -> None:
    """An invalid folder or run argument is named with the allowed values; nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert halfstep.watch(**{argument: given}).folder is None
    [line] = capsys.readouterr().err.splitlines()
    assert f"ValueError: {argument} is {safe_repr(given)[:200]}" in line
    assert "; allowed: " in line
    assert list(tmp_path.iterdir()) == []


def test_invalid_names_of_runs_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid names, projects and tags print one line each, and the run keeps the valid ones."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": 5}, "name is ignored: it is 5; allowed: "),
        ({"name": " "}, "name is ignored: it is ' '; allowed: "),
        ({"name": "n" * 300}, f"name is ignored: it is '{'n' * 199}…; allowed: "),
        ({"project": 5}, "project is ignored: it is 5; allowed: "),
        ({"tags": 5}, "tags is ignored: it is 5; allowed: texts, in a list"),
        ({"tags": [1, None, "good"]}, "tags: 1, None is ignored; allowed: "),
    ]
    for number, (arguments, said) in enumerate(wrong):
        halfstep.watch(folder=tmp_path / str(number), **arguments).finish()
        line, _watching = capsys.readouterr().err.splitlines()
        assert line.startswith(f"halfstep: {said}")
        if "allowed: texts" not in said:
            assert line.endswith("of 1 to 200 characters, and not only blanks")
        [described] = (tmp_path / str(number)).glob("*/run.json")
        run = json.loads(described.read_text())
        assert run["name"] == described.parent.name
        assert run["project"] is None
        assert run["tags"] == (["good"] if number == 5 else [])


@pytest.mark.parametrize(
    ("tags", "kept"), [("fp16", ["fp16"]), (("a", "b"), ["a", "b"]), (None, [])]
)
def test_a_single_text_is_one_tag(tmp_path: Path, tags: Any, kept: list[str]) -> None:
    """A text becomes a list of one tag, and None an empty list."""
    halfstep.watch(folder=tmp_path, name="it", tags=tags).finish()
    assert json.loads((tmp_path / "it" / "run.json").read_text())["tags"] == kept


WRONG_ONES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a number": (
        lambda: {"optimizers": [5]},
        "optimizers is ignored and all optimizers are observed: it h",
    ),
    "no list": (lambda: {"optimizers": 5}, "it has 5; allowed: optimizers of torch, in a list or"),
    "none": (lambda: {"optimizers": []}, "it is []; allowed: optimizers of torch, in a list or by"),
    "a module": (lambda: {"optimizers": [Net()]}, "it has Net( (body): Linear("),
    "a name": (
        lambda: {"optimizers": {1: torch.optim.SGD([nn.Parameter(torch.ones(1))])}},
        "it has the name 1; allowed: optimizers of torch, in a list or by name",
    ),
    "a scaler": (
        lambda: {"scaler": "x"},
        "scaler is ignored and all scalers are observed: it is 'x'; allowed: a torch.amp.Grad",
    ),
}


@pytest.mark.parametrize("name", WRONG_ONES)
def test_with_invalid_filters_all_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Invalid warning filters are reported in a line, and every step and skip is recorded."""
    wrong, said = WRONG_ONES[name]
    with halfstep.watch(folder=tmp_path, name="it", **wrong()) as watch:
        truth = Script().train(watch.add, steps=12)
    written = Written(tmp_path / "it").truth()
    assert (written.scales, written.skipped) == (truth.scales, truth.skipped)
    assert any(truth.skipped)
    [line, _watching] = capsys.readouterr().err.splitlines()
    assert said in line


def test_an_error_of_ours_ends_no_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error prints one line, removes the wrappers and leaves the weights unchanged."""
    bare = Script().train(steps=12)
    write, calls = halfstep.watching.row_writer.RowWriter.write, iter(range(100))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise OSError("no space\nleft")
        return write(*arguments)

    monkeypatch.setattr(halfstep.watching.row_writer.RowWriter, "write", failing)
    watch = halfstep.watch(folder=tmp_path, name="it")
    watched = Script().train(watch.add, steps=12)
    watch.log({"a": 1})
    watch.finish()
    assert all(map(torch.equal, watched.weights, bare.weights))
    assert len(capsys.readouterr().err.splitlines()) == 2
    [result] = Written(tmp_path / "it").of("failed_diagnosis")
    assert (result["diagnosis"], result["step"]) == ("watch", 5)
    assert Written(tmp_path / "it").steps["step"].tolist() == [1, 2, 3, 4, 5]
    outcome = json.loads((tmp_path / "it" / "outcome-1.json").read_text())
    assert (outcome["status"], outcome["step"]) == ("finished", 5)


def test_a_script_that_raises_after_an_error_of_ours_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that raises after an internal error has failed, without its last steps."""

    def failing(*_: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(halfstep.watching.row_writer.RowWriter, "write", failing)

    def script() -> None:
        with halfstep.watch(folder=tmp_path, name="it") as watch:
            Script().train(watch.add, steps=3)
            raise KeyError("broken")

    with pytest.raises(KeyError):
        script()
    outcome = json.loads((tmp_path / "it" / "outcome-1.json").read_text())
    assert (outcome["status"], "KeyError: 'broken'" in outcome["error"]) == ("failed", True)


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "add": (lambda watch: watch.add("net"), "it got 'net'; allowed: modules of torch"),
    "add, an optimizer": (
        lambda watch: watch.add(torch.optim.SGD([torch.zeros(1)])),
        "it got the optimizer SGD; allowed: optimizers=[…]",
    ),
    "configure": (lambda watch: watch.configure([1]), "it is [1]; allowed: a dictionary"),
    "resume": (
        lambda watch: watch.resume("abc"),
        "its step is 'abc'; allowed: a whole number from 0",
    ),
    "resume, below 0": (lambda watch: watch.resume(-1), "its step is -1; "),
    "resume, a fraction": (lambda watch: watch.resume(1.5), "its step is 1.5; "),
    "log_on": (lambda watch: watch.log_on(None), "its step is None; "),
    "loss": (lambda watch: watch.loss("abc"), "it is 'abc'; allowed: a number or a tensor"),
    "loss, too large": (lambda watch: watch.loss(10**400), "it is "),
    "loss, complex": (lambda watch: watch.loss(torch.tensor(1j)), "it is tensor("),
    "log": (lambda watch: watch.log({"a": 1}, step="x"), "its step is 'x'; "),
    "checkpoint": (lambda watch: watch.checkpoint(None), "TypeError: "),
    "checkpoint, its kind": (lambda watch: watch.checkpoint(__file__, kind=5), "TypeError: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_of_a_method_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A call with an invalid argument prints a line and is ignored; the run is complete."""
    call, said = WRONG[name]
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        call(watch)
        bf16(watch, epochs=5)
    assert Written(tmp_path / "it").steps["step"].tolist() == [1, 2, 3, 4, 5]
    outcome = json.loads((tmp_path / "it" / "outcome-1.json").read_text())
    assert (outcome["status"], outcome["step"]) == ("finished", 5)
    [_watching, line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: {name.split(',')[0]} is ignored: {said}")


def make_closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [make_closed(), None], ids=["closed", "none"])
def test_an_unreportable_error_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    """An error that cannot be printed, because stderr is closed, ends no loop."""

    def failing(*_: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(halfstep.recording.gradients.Gradients, "norms", failing)
    monkeypatch.setattr(sys, "stderr", stream)
    watch = halfstep.watch(folder=tmp_path, name="it")
    Script().train(watch.add, steps=3)
    halfstep.watch(folder=tmp_path, mode="sometimes")  # type: ignore[arg-type]
    assert Written(tmp_path / "it").of("failed_diagnosis")


def test_an_interrupt_in_the_midst_of_our_work_does_not_hold_a_later_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that continues after Ctrl-C within our code can still be ended by SIGTERM."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    watch = halfstep.watch(folder=tmp_path, name="it")
    monkeypatch.setattr(halfstep.recording.gradients.Gradients, "norms", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Script().train(watch.add, steps=3)
    assert watch._run.outcome.exit_hooks.held == 0
    watch.finish()


def test_an_uploader_that_cannot_be_started_again_ends_no_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the uploader cannot be started again, data stay in the folder and watching goes on."""
    starts = iter(["http://server/runs/1"])

    def start(*_: Any, **_named: Any) -> str:
        for page in starts:
            return page
        raise OSError("no process to spare")

    monkeypatch.setattr(uploader, "start", start)
    monkeypatch.setattr(run_upload, "REVIVAL_SECONDS", -1.0)
    monkeypatch.setattr(ring, "DRAIN_ROWS", 1)
    watch = halfstep.watch(folder=tmp_path, name="it", url="http://server", token="hs_secret")
    Script().train(watch.add, steps=12)
    watch.finish()
    assert len(Written(tmp_path / "it").steps) == 12
    assert "unwatched" not in capsys.readouterr().err


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_has_the_attributes_that_are_read(name: str) -> None:
    """torch has the private attributes that Halfstep reads."""
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    assert hasattr(scaler, name)
    state = scaler._per_optimizer_states[0]
    assert state["found_inf_per_device"] == {}


@looped("name", METHODS)
def test_torch_has_the_methods_that_are_wrapped(name: str) -> None:
    """torch has the methods that Halfstep wraps; a renamed one would leave loops unobserved."""
    assert callable(vars(GradScaler)[name])


def test_a_torch_that_has_not_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing method of torch is reported with its class, and the loop continues."""
    monkeypatch.setattr("halfstep.watching.scaler_calls.PRIVATE", (*PRIVATE, "_gone"))
    with halfstep.watch(folder=tmp_path) as watch:
        Script().train(watch.add, steps=2)
    assert "GradScaler has no _gone" in capsys.readouterr().err


def test_nothing_keeps_a_model_alive(tmp_path: Path) -> None:
    """An ended run releases the watched model."""
    import weakref

    net = Net()
    there = weakref.ref(net.body.weight)
    halfstep.watch(net, folder=tmp_path).finish()
    del net
    gc.collect()
    assert there() is None


SCRIPT = """
import os, signal, sys, torch, halfstep
from torch.amp import GradScaler
def main(end):
    net = torch.nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), GradScaler("cpu")
    watch = halfstep.watch(net, folder=sys.argv[1], name="it")
    for _ in range(5):
        scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    end()
def raises(): raise KeyError("broken")
def terminated(): os.kill(os.getpid(), signal.SIGTERM); signal.pause()
def own_handler():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); terminated()
def forks():
    if os.fork() == 0: sys.exit(0)
    os.wait()
def loads():
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, i):
            GradScaler("cpu").scale(torch.ones((), requires_grad=True)).backward()
            return i
    list(torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))
def returns(): pass
def exits(): sys.exit(3)
main(globals()[sys.argv[2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "status", "error"),
    [
        ("returns", 0, "finished", None),
        ("exits", 3, "failed", None),
        ("raises", 1, "failed", "KeyError: 'broken'"),
        ("terminated", -signal.SIGTERM, "terminated", None),
        ("own_handler", 7, "failed", None),
        ("forks", 0, "finished", None),
        ("loads", 0, "finished", None),
    ],
)
def test_however_a_script_ends_its_last_rows_are_there(
    tmp_path: Path, end: str, code: int, status: str, error: str | None
) -> None:
    """The script's exit code is unchanged, and its last rows are there."""
    done = preloaded.run(
        [sys.executable, "-c", SCRIPT, tmp_path, end],
        env={**os.environ, "PYTHONPATH": str(Path(halfstep.__file__).parents[1])},
    )
    assert done.returncode == code, done.stderr
    assert Written(tmp_path / "it").steps["step"].tolist() == [1, 2, 3, 4, 5]
    outcome = json.loads((tmp_path / "it" / "outcome-1.json").read_text())
    assert (outcome["status"], outcome["step"]) == (status, 5)
    if error is None:
        assert outcome["error"] is None
    else:
        assert error in outcome["error"]
        assert error in done.stderr
    assert done.stderr.count("halfstep:") == 1


SIGNALLED = """
import signal, sys, halfstep
watch = halfstep.watch(folder=sys.argv[1], name="it")
ended = []
watch._run.outcome.exit_hooks.terminate = lambda: ended.append("now")
def interrupted():
    signal.raise_signal(signal.SIGTERM)
    assert ended == []
watch._guard(interrupted)
assert ended == ["now"]
watch._run.outcome.exit_hooks.is_due = False
watch.finish()
"""


@pytest.mark.slow
def test_a_signal_in_the_midst_of_our_work_waits_for_its_end(tmp_path: Path) -> None:
    """A signal within our code is handled after it; the spool is never written twice at once."""
    done = preloaded.run(
        [sys.executable, "-c", SIGNALLED, tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(halfstep.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr


def test_all_that_is_written_can_be_recorded(tmp_path: Path) -> None:
    """Every event that a watched run writes is valid for the recorder."""
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        Script().train(watch.add, steps=STEPS)
    assert all(map(event_of, Written(tmp_path / "it").events))


def test_parameters_that_no_module_has_are_called_by_their_place(tmp_path: Path) -> None:
    """watch() without a module names culprits by their position."""
    net, scaler = Net(), GradScaler("cpu")
    optimizer = torch.optim.SGD(net.head.parameters(), lr=1e-3)
    with halfstep.watch(folder=tmp_path, name="it"):
        scaler.scale(net(torch.ones(1, 8)).sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    [skip] = Written(tmp_path / "it").of("scaler", "skip")
    assert [each["name"] for each in skip["culprits"]] == ["group0.0", "group0.1"]


def test_modules_of_one_class_are_numbered() -> None:
    """Modules of one class are numbered: their parameters have class and number as prefix."""
    from halfstep.recording.gradients import parameter_names

    names = parameter_names((nn.Linear(1, 1), nn.Conv1d(1, 1, 1, bias=False), nn.Linear(1, 1)))
    assert list(names.values()) == [
        "Linear1.weight",
        "Linear1.bias",
        "Conv1d.weight",
        "Linear2.weight",
        "Linear2.bias",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of torch itself
@pytest.mark.parametrize("is_scaled", [True, *extended([False])])
def test_a_step_that_is_compiled_whole_is_watched(tmp_path: Path, is_scaled: bool) -> None:
    """With the whole step in torch.compile the bits are the same, and every step is recorded."""

    def train(watch: Any = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        scaler = GradScaler("cpu", enabled=is_scaled)
        if watch:
            watch.add(net)

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        for _ in range(3):
            step(torch.ones(4, 8))
        return [p.detach() for p in net.parameters()]

    bare = train()
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        assert all(map(torch.equal, train(watch), bare))
    steps = Written(tmp_path / "it").steps
    assert len(steps) == 3
    assert (steps["loss"] > 0).all()


RANK = """
import sys, torch, halfstep
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
place = f"file://{sys.argv[1]}/meet"
dist.init_process_group("gloo", place, rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
if sys.argv[3] == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
else:
    net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = (ShardedGradScaler if sys.argv[3] == "sharded" else GradScaler)("cpu")
with halfstep.watch(net, folder=sys.argv[1], name="it"):
    for step in range(4):
        optimizer.zero_grad()
        factor = float("inf") if step == 2 and dist.get_rank() else 1.0
        scaler.scale(net(torch.ones(1, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "sharded", "fsdp2"])
def test_of_processes_that_train_together_one_writes(tmp_path: Path, kind: str) -> None:
    """With DDP, either scaler, and FSDP2 one process writes every rank's overflows."""
    ranks = [
        warm.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank), kind])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    written = Written(tmp_path / "it")
    assert written.steps["step"].tolist() == [1, 2, 3, 4]
    [skip] = written.of("scaler", "skip")
    assert (skip["step"], [c["name"] for c in skip["culprits"]]) == (3, ["weight", "bias"])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["it"]


def test_a_full_disk_does_not_end_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps and files during a full disk are lost with a message; later ones are recorded."""
    from halfstep.telemetry import patient_spool
    from tests.halfstep.telemetry.patient_spool_made import full

    monkeypatch.setattr(patient_spool, "RETRY_SECONDS", 0)
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        with full(20):
            bf16(watch, epochs=40)
            watch.log({"a": "text"})
            watch._loop.drain(1.0)
        watch.log({"late": 1.0})
    written = Written(tmp_path / "it")
    assert len(written.steps) == 0
    assert [(event["name"], event["step"]) for event in written.of("metric")] == [("late", 40)]
    result = capsys.readouterr().err
    assert "the spool can be written again: 40 steps" in result
    assert (tmp_path / "it" / "outcome-1.json").exists()


def test_secrets_are_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the command line and the token in use are redacted in command and
    configuration.
    """
    token = "hs_0123456789"
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "abc", "--lr=1", token])
    config = {"argument": token, "lr": 1}
    halfstep.watch(folder=tmp_path, name="it", config=config, token=token, mode="offline").finish()
    run = json.loads((tmp_path / "it" / "run.json").read_text())
    assert run["attempts"][0]["command"] == [
        "python",
        "train.py",
        "--api-key",
        "***",
        "--lr=1",
        "***",
    ]
    assert run["config"] == {"argument": "***", "lr": 1}


def test_a_torch_with_cuda_and_no_driver_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build of torch without a driver is watched, although its capture query raises."""

    def no_driver() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    for module in (hooks, listener, clip_wrappers, shadow_mode):
        monkeypatch.setattr(module, "is_capturing", no_driver)
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        Script(clip=1.0).train(watch.add, steps=12)
    assert len(Written(tmp_path / "it").steps) == 12
