"""Numbers that scripts log: their names, types and steps."""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfstep
from halfstep.session import active_run, arguments, watched_run
from halfstep.session.step_numbers import step_number
from tests.halfstep.watching.watch_made import Written
from tests.marks import looped


@pytest.fixture(autouse=True)
def beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide an empty folder, and end the test's run."""
    monkeypatch.chdir(tmp_path)
    yield
    if active_run.active:
        active_run.active.finish()


def watch(**named: Any) -> halfstep.Watch:
    return halfstep.watch(name="run", mode="offline", console=False, system=False, **named)


def read_logged() -> list[tuple[str, int, float]]:
    """Return name, step and value of each number of the run."""
    events = Written(Path("halfstep-runs/run")).of("metric")
    return [(event["name"], event["step"], event["value"]) for event in events]


NUMPY = [np.bool_, np.int8, np.uint16, np.int64, np.uint64, np.float16, np.float32, np.longdouble]
TORCH = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
TORCH += [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]
ONES = [Decimal(1), Fraction(1), True, *(kind(1) for kind in NUMPY)]
ONES += [np.array([[1]], kind) for kind in NUMPY]
ONES += [torch.ones(shape).to(kind) for kind in TORCH for shape in ((), (1, 1))]


def test_numbers_of_every_type_are_logged() -> None:
    """Numbers of Python, numpy and torch are logged, also arrays of one element."""
    run = watch()
    for step, value in enumerate(ONES):
        run.log({"one": value}, step=step)
    run.finish()
    assert read_logged() == [("one", step, 1.0) for step in range(len(ONES))]


def test_what_only_resembles_a_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Complex numbers, dates and arrays of text are refused; a NumPy text is logged as text."""
    run = watch()
    values = [np.complex64(1 + 2j), 1j, np.datetime64("2026-01-01"), np.timedelta64(5, "s")]
    values += [np.array("3"), torch.tensor(1 + 2j), Decimal("sNaN")]
    for number, value in enumerate(values):
        run.log({f"value {number}": value})
    run.log({"note": np.str_("3")})
    run.finish()
    assert read_logged() == []
    said = capsys.readouterr().err
    assert all(f"value {number} is not logged" in said for number in range(len(values)))
    assert [path.name for path in Path("halfstep-runs").rglob("*.txt")] == ["note.txt"]


def test_nested_dictionaries_have_names_with_slashes() -> None:
    """Dictionaries of any depth are logged, and empty ones add nothing."""
    run = watch()
    run.log({"val": {"top": {"1": 0.5}, "loss": 2}, "empty": {}, "lr": 0.1})
    run.finish()
    assert read_logged() == [("val/top/1", 0, 0.5), ("val/loss", 0, 2.0), ("lr", 0, 0.1)]


WHOLE = [3, 3.0, np.int32(3), np.float16(3), np.array(3.0), torch.tensor(3), torch.tensor([3.0])]


@looped("value", [*WHOLE, Decimal(3), Fraction(3)])
def test_a_whole_number_of_any_type_is_a_step(value: Any) -> None:
    """A whole number of any type is accepted as a step, also a float such as a computed epoch."""
    assert step_number(value) == 3


@looped("value", [3.5, True, np.bool_(True), "3", -1.0, np.nan, np.inf, 2.0**60])
def test_other_values_are_no_steps(value: Any) -> None:
    """Values that are not whole numbers are rejected as steps, and nothing is rounded."""
    with pytest.raises(arguments.BadArgument, match="allowed: a whole number from 0"):
        step_number(value)


def test_calls_without_a_step_are_not_all_at_step_0() -> None:
    """Without optimizer steps, logging a name again begins the next step."""
    for attempt in range(2):
        run = watch(run="run")
        for number in range(3):
            run.log({"loss": 3 * attempt + number})
            run.log({"acc": 0.5})
        run.finish()
    assert [(s, v) for n, s, v in read_logged() if n == "loss"] == [(s, s) for s in range(6)]
    assert [step for name, step, _ in read_logged() if name == "acc"] == list(range(6))


def test_a_call_without_a_step_follows_one_with_a_step() -> None:
    """A call without a step logs at the last given step, unless that has the name already."""
    run = watch()
    run.log({"loss": 1}, step=7)
    run.log({"acc": 2})
    run.log({"acc": 3})
    run.finish()
    assert read_logged() == [("loss", 7, 1), ("acc", 7, 2), ("acc", 8, 3)]


def test_a_decimal_loss_is_the_row_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Decimal is a loss in a script without torch, also at a step that is a float."""
    monkeypatch.setattr(watched_run, "find_spec", lambda name: None)
    wandb: Any = halfstep
    wandb.init(name="run", mode="offline")
    wandb.log({"loss": Decimal("0.5")}, step=4.0)
    wandb.log({"val": {"acc": 1}}, step=np.float32(4))
    wandb.finish()
    rows = Written(Path("halfstep-runs/run")).steps
    assert rows[["step", "loss"]].tolist() == [(4, 0.5)]
    assert ("val.acc", 4, 1.0) in read_logged()
