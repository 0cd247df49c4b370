"""Precision diffs in a watched loop."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import halfstep
from halfstep.precision_lab.report import PrecisionReport
from halfstep.telemetry.events import Event, PrecisionDiff
from halfstep.telemetry.spool import SpoolReader
from tests.halfstep.precision_lab.models_made import Transformer, next_token, tokens

STEPS = 6


def train(folder: Path, *, diffs: bool) -> tuple[list[Tensor], list[PrecisionReport | None]]:
    """Train a watched loop with a scaler; return the weights and the reports."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    reports = []
    with halfstep.watch(model, folder=folder, name="it", mode="offline", headroom_every=2) as run:
        for step in range(STEPS):
            batch = tokens()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = next_token(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if diffs and step % 3 == 2:
                reports.append(run.precision_diff(lambda batch=batch: next_token(model, batch)))
    return [*model.state_dict().values(), torch.get_rng_state()], reports


def events(folder: Path) -> list[Event]:
    """Return the events of the only run, without the diffs."""
    [spool] = folder.glob("*/spool")
    return [item for item in SpoolReader(spool).poll() if isinstance(item, Event)]


def test_diff_is_an_event_of_its_step(tmp_path: Path) -> None:
    """A diff is an event of its step with the scaler's scale; the training is unchanged."""
    without, _ = train(tmp_path / "a", diffs=False)
    with_diffs, reports = train(tmp_path / "b", diffs=True)
    assert all(map(torch.equal, with_diffs, without))
    recorded = [each for each in events(tmp_path / "b") if isinstance(each, PrecisionDiff)]
    assert [(each.step, each.dtype, each.scale) for each in recorded] == [
        (3, "float16", 2.0**13),
        (6, "float16", 2.0**15),
    ]
    for report, event in zip(reports, recorded, strict=True):
        assert isinstance(report, PrecisionReport)
        assert len(event.rows) == len(report.rows) > 70
        assert not report.suggest()
    others = [repr(each) for each in events(tmp_path / "b") if not isinstance(each, PrecisionDiff)]
    expected = [repr(each) for each in events(tmp_path / "a")]
    assert sorted(others) == sorted(expected)


def test_failure_is_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A closure that raises, or a run without a model, prints a line, and training continues."""
    model = Transformer()
    with halfstep.watch(folder=tmp_path, name="it", mode="offline") as run:
        assert run.precision_diff(lambda: next_token(model, tokens())) is None
        run.add(model)
        assert run.precision_diff(lambda: 1 / 0) is None  # type: ignore[arg-type,return-value]
        assert run.precision_diff(lambda: next_token(model, tokens()), scale=-1.0) is None
        fixed = tokens()
        report = run.precision_diff(lambda: next_token(model, fixed))
        assert report is not None
        assert report.event.dtype == "bfloat16"  # without a scaler
    lines = capfd.readouterr().err
    assert "precision_diff is ignored: no module is watched; name the model: watch(model)" in lines
    assert "precision_diff is ignored: ZeroDivisionError" in lines
    assert "scale = -1.0: must be a finite number greater than 0" in lines


def test_unwatched_run_does_nothing() -> None:
    """A disabled run does not call the closure."""
    run = halfstep.watch(mode="disabled")
    assert run.precision_diff(lambda: pytest.fail("called")) is None
