"""Frozen steps: every reader returns the same bits as before, whatever the steps are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from obstore.store import MemoryStore, ObjectStore
from sqlalchemy import select

from db.database import Database
from db.tables import FrozenSteps, Run, StepBucket
from db.telemetry import freeze, pyramid, telemetry
from halfstep.telemetry.flags import NOT_STEPPED, SKIPPED, UNKNOWN_LOSS
from tests.db.telemetry import frozen_made
from tests.db.telemetry.frozen_made import begin_again, end, everything, freeze_run, rows_of
from tests.db.telemetry.telemetry_made import forget, make_events, make_steps, record

numbers = st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3.4e38]) | st.floats(width=32)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups, batches and the latest rows are small, so that short runs have many."""
    monkeypatch.setattr(freeze, "GROUP_STEPS", 64)
    monkeypatch.setattr(freeze, "BATCH_ROWS", 50)
    monkeypatch.setattr(freeze, "LEAST_STEPS", 10)


@st.composite
def histories(draw: st.DrawFn) -> NDArray[Any]:
    """Draw the steps of a run with gaps, flags, and numbers that are not finite."""
    first = draw(st.sampled_from([1, 60, 4090]))
    losses = draw(st.lists(numbers, min_size=1, max_size=40))
    length = draw(st.sampled_from([len(losses), 300, 1200]))
    steps = make_steps(np.resize(losses, length).tolist(), first=first)
    for name in ("grad_norm", "grad_norm_clipped", "scale"):
        steps[name] = np.resize(draw(st.lists(numbers, min_size=1, max_size=9)), length)
    if draw(st.booleans()):  # one that four bytes do not hold
        kinds = [(name, steps.dtype[name]) for name in steps.dtype.names or ()]
        steps = steps.astype([(name, "f8" if name == "loss" else kind) for name, kind in kinds])
        steps["loss"][::3] = draw(st.floats(-1e30, 1e30))
    waits = st.lists(st.sampled_from([-1, 0, 40, 10**7]), min_size=1, max_size=5)
    steps["data_us"] = np.resize(draw(waits), length)
    for flag in (SKIPPED, NOT_STEPPED, UNKNOWN_LOSS, SKIPPED | 1 << 8, SKIPPED | 1 << 9):
        steps["flags"][draw(st.lists(st.integers(0, length - 1), max_size=3))] |= flag
    lost = draw(st.sets(st.integers(0, length - 1), max_size=9))
    return np.delete(steps, sorted(lost)[: length - 1])


@pytest.mark.slow
@given(
    steps=histories(),
    zooms=st.lists(st.tuples(st.integers(1, 5300), st.integers(1, 5300)), max_size=3),
    resumed=st.integers(1, 5300),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_reader_returns_the_same_from_a_file(
    database: Database,
    running: Run,
    tmp_path: Path,
    steps: NDArray[Any],
    zooms: list[tuple[int, int]],
    resumed: int,
) -> None:
    """After a freeze, after a resume of the frozen run, and after its second freeze."""
    store, zooms = MemoryStore(), [(min(zoom), max(zoom)) for zoom in zooms]
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.attempt, run.status, run.step, run.skipped, run.not_stepped = 1, "running", 0, 0, 0
        for row in session.scalars(select(FrozenSteps)):
            session.delete(row)
    forget(database, running)
    skipped = steps["step"][steps["flags"] & SKIPPED > 0].tolist()
    record(
        database,
        running,
        *(part for part in np.array_split(steps, 3) if len(part)),
        events=make_events(skipped),
    )
    end(database, running)
    with frozen_made.reading_files(database, store) as other:
        before, stones = everything(other, running.id, zooms), _stones(other)
        freeze_run(other, store, running, tmp_path)
        assert rows_of(other, running) < max(len(steps), 400)
        _assert_same(everything(other, running.id, zooms), before)
        with other.writing() as session:
            pyramid.rebuild(session, running.id)
        assert _stones(other) == stones

        plain = _resume(database, other, store, running, steps, resumed, tmp_path, zooms)
        _assert_same(everything(other, running.id, zooms), plain)


def _assert_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        assert after[name] == value, name


def _stones(database: Database) -> list[tuple[Any, ...]]:
    table = StepBucket.__table__
    with database.reading() as session:
        return [tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))]


def _resume(
    database: Database,
    other: Database,
    store: ObjectStore,
    run: Run,
    steps: NDArray[Any],
    resumed: int,
    folder: Path,
    zooms: list[tuple[int, int]],
) -> dict[str, Any]:
    """Resume a frozen run, end and freeze it again; return what readers return before that."""
    after = int(np.clip(resumed, steps["step"][0], steps["step"][-1]))
    run = begin_again(other, run)
    with other.writing() as session:
        telemetry.truncate(session, run.id, run.attempt, after=after)
    new = make_steps([0.25] * 150, first=after + 1, skipped=[after + 3])
    record(other, run, new[:20], new[20:])
    expected = np.concatenate([steps["step"][steps["step"] <= after], new["step"]])
    found = everything(other, run.id, zooms)
    assert eval(found["raw"])["step"] == expected.tolist()
    end(other, run)
    ended = everything(other, run.id, zooms)
    freeze_run(other, store, run, folder)
    return ended
