"""Frozen steps: every reader returns the same bits as before, whatever the steps are."""

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import Any

import numpy as np
import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from obstore.store import LocalStore, MemoryStore, ObjectStore
from sqlalchemy import func, select
from sqlalchemy.orm import Session, make_transient

from db.database import Database
from db.errors import Conflict, StepsMissing, StepsUnreadable, StorageUnreachable
from db.files import object_store, step_files, storage
from db.files.step_files import NAMES, StepFile, StepFiles
from db.files.storage import mend, mismatches
from db.tables import FrozenSteps, Run, RunNode, Step, StepBucket
from db.telemetry import freeze, frozen_steps, pyramid, series, telemetry, unfreeze, windows
from halfstep.telemetry.flags import NOT_STEPPED, SKIPPED, UNKNOWN_LOSS
from tests.db.telemetry import frozen_made
from tests.db.telemetry.frozen_made import (
    Gate,
    StopsLate,
    begin_again,
    end,
    everything,
    freeze_run,
    rows_of,
)
from tests.db.telemetry.telemetry_made import forget, make_events, make_steps, record
from tests.marks import extended

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
    for name in ("grad_norm", "grad_norm_clipped", "scale", "lr"):
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
    resumed=st.integers(0, 5300),
)
@settings(
    max_examples=settings.default.max_examples // 3,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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
        flagged = rows_of(other, running, are_flagged=True)
        freeze_run(other, store, running, tmp_path)
        assert rows_of(other, running, are_flagged=True) == flagged
        assert rows_of(other, running) - flagged < max(len(steps) - flagged, 400)
        _assert_same(everything(other, running.id, zooms), before)
        remaining = _stones(other)
        assert set(remaining) <= set(stones)
        with other.writing() as session:
            pyramid.rebuild(session, running.id)
        assert set(_stones(other)) <= set(remaining)
        _assert_same(everything(other, running.id, zooms), before)

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
    after = int(np.clip(resumed, steps["step"][0] - 1, steps["step"][-1]))
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


def make_history(
    database: Database, run: Run, length: int = 700, *, has_diverged: bool = False
) -> None:
    """Record and end a run with skips, losses that are not finite, and a lost step."""
    steps = make_steps([1.0 + step % 9 for step in range(length)], skipped=[5, 101, 102])
    steps["loss"][[77, length // 2]] = np.nan, np.inf
    if has_diverged:
        steps["loss"][length // 4 :] = np.nan
    record(database, run, np.delete(steps, 99), events=make_events([5, 101, 102]))
    end(database, run)


ZOOMS = [(1, 130), (90, 110), (300, 690)]


def test_a_second_call_changes_nothing(database: Database, running: Run, tmp_path: Path) -> None:
    """A frozen run keeps its file and its rows."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    rows = rows_of(database, running)
    assert row.is_settled
    assert rows < 300
    again = freeze_run(database, store, running, tmp_path)
    assert (again.key, rows_of(database, running)) == (row.key, rows)
    assert _keys(store) == [row.key]


def test_the_rows_of_a_second_file_replace_the_first(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """The file of a resumed run has all steps; the one before it is deleted an hour later."""
    store = LocalStore(tmp_path)
    make_history(database, running)
    first = freeze_run(database, store, running, tmp_path)
    with frozen_made.reading_files(database, store) as other:
        run = begin_again(other, running)
        record(other, run, make_steps([0.5] * 300, first=650))
        end(other, run)
        before = everything(other, run.id, ZOOMS)
        second = freeze_run(other, store, run, tmp_path)
        _assert_same(everything(other, run.id, ZOOMS), before)
    assert (first.attempt, second.attempt, second.step) == (1, 2, 949)
    with database.reading() as session:
        assert mismatches(session, store) == []
        assert session.get_one(Run, run.id).stored_bytes == 0  # nor did the rows count
    # A backup that has read the first row still copies its file, however old that is.
    os.utime(tmp_path / first.key, (0, 0))
    for is_settled in (False, True):
        assert freeze_run(database, store, run, tmp_path).is_settled is is_settled
        assert sorted(_keys(store)) == sorted([first.key, second.key][is_settled:])
        with database.reading() as session:
            assert mismatches(session, store) == []
            assert freeze.due(session, 0.0, most=5) == [run.id][is_settled:]
        os.utime(tmp_path / second.key, (0, 0))


def test_a_file_of_another_database_stays(
    database: Database, running: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the file that this database has recorded before is deleted."""
    monkeypatch.setattr(storage, "ORPHAN_SECONDS", 0.0)
    store = MemoryStore()
    make_history(database, running)
    other = f"steps/{running.id}/0.parquet"
    obstore.put(store, other, b"x")
    first = freeze_run(database, store, running, tmp_path)
    with frozen_made.reading_files(database, store) as reader:
        end(reader, begin_again(reader, running))
        second = freeze_run(reader, store, running, tmp_path)
    assert (second.is_settled, second.previous_key) == (True, None)
    assert second.key != first.key
    assert sorted(_keys(store)) == sorted([other, second.key])


def test_a_file_may_be_older_than_its_row(database: Database, running: Run, tmp_path: Path) -> None:
    """A check lists a file without a row only once no freeze may publish it any more."""
    store = LocalStore(tmp_path)
    end(database, running)
    key = f"steps/{running.id}/0.parquet"
    obstore.put(store, key, b"x")
    with database.reading() as session:
        assert mismatches(session, store) == []
        os.utime(tmp_path / key, (0, 0))
        assert [each.key for each in mismatches(session, store)] == [key]


class _Begins(Event):
    """Begins another attempt of a run while its steps are read."""

    def __init__(self, database: Database, run: Run) -> None:
        super().__init__()
        self._database, self._run = database, run

    def wait(self, timeout: float | None = None) -> bool:
        begin_again(self._database, self._run)
        return False


def test_a_run_that_continues_meanwhile_is_not_frozen(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Its steps stay rows, and the file is deleted."""
    store = MemoryStore()
    make_history(database, running)
    stopping = _Begins(database, running)
    freeze.freeze(database, store, running.id, folder=tmp_path, stopping=stopping)
    assert rows_of(database, running) == 699
    assert _keys(store) == []
    with database.reading() as session:
        assert session.scalars(select(FrozenSteps)).all() == []


class _Stops(Event):
    """Is set with the first pause between two batches of a run with a file."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    def wait(self, timeout: float | None = None) -> bool:
        with self._database.reading() as session:
            return session.scalar(select(FrozenSteps.id)) is not None


def test_a_run_that_continues_while_rows_are_deleted_keeps_all_steps(
    database: Database, running: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of its rows stay until the next freeze."""
    monkeypatch.setattr(storage, "ORPHAN_SECONDS", 0.0)
    store = MemoryStore()
    make_history(database, running)
    with frozen_made.reading_files(database, store) as other:
        before = everything(other, running.id, ZOOMS)
        with pytest.raises(freeze.Stopped):
            freeze.freeze(other, store, running.id, folder=tmp_path, stopping=_Stops(database))
        rows = rows_of(other, running)
        _assert_same(everything(other, running.id, ZOOMS), before)
        run = begin_again(other, running)
        freeze.freeze(other, store, run.id, folder=tmp_path, stopping=Event())
        assert rows_of(other, run) == rows
        end(other, run)
        row = freeze_run(other, store, run, tmp_path)
        after = everything(other, running.id, ZOOMS)
    assert (row.attempt, row.is_settled) == (2, True)
    assert after["raw"] == before["raw"]


def test_an_unfrozen_run_is_as_before(database: Database, running: Run, tmp_path: Path) -> None:
    """Rows and summaries are equal, and nothing names a file; the run can be frozen again."""
    store = MemoryStore()
    make_history(database, running)
    rows, stones = _rows(database), _stones(database)
    key = freeze_run(database, store, running, tmp_path).key
    assert _rows(database) != rows
    changed = partial(unfreeze.unfreeze, database, store, running.id)
    with pytest.raises(freeze.Stopped):
        changed(stopping=_Stops(database))
    assert changed(stopping=Event())
    assert (_rows(database), _stones(database), _keys(store)) == (rows, stones, [key])
    assert not changed(stopping=Event())
    assert freeze_run(database, store, running, tmp_path).is_settled


def test_an_active_run_is_not_unfrozen(
    database: Database, resumed: tuple[Run, ObjectStore], tmp_path: Path
) -> None:
    """Its recorder writes the same rows."""
    run, store = resumed
    rows = rows_of(database, run)
    with pytest.raises(Conflict, match="unfreeze it when it has ended"):
        unfreeze.unfreeze(database, store, run.id, stopping=Event())
    assert rows_of(database, run) == rows


@pytest.mark.parametrize("stops", ["at its end", "while it writes"])
def test_an_interrupted_freeze_is_unfrozen(
    database: Database, running: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    """No server may continue it: freezing may be off by then. If one does, it deletes no row."""
    for module in (freeze, unfreeze):
        monkeypatch.setattr(module, "BATCH_ROWS", 100)
    store = MemoryStore()
    make_history(database, running)
    rows, stones = _rows(database), _stones(database)
    changed = partial(unfreeze.unfreeze, database, store, running.id)
    left: list[Any] = []

    class Unfreezes(_Stops):
        """Lets the run be unfrozen in the pause after the third batch, then goes on."""

        pauses = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.pauses += super().wait()
            if self.pauses == 3:
                assert rows_of(database, running) < len(rows)
                if stops == "at its end":
                    assert changed(stopping=Event())
                else:
                    with pytest.raises(freeze.Stopped):
                        changed(stopping=StopsLate(3))
                left.append(_rows(database))
            return False

    freeze.freeze(database, store, running.id, folder=tmp_path, stopping=Unfreezes(database))
    assert [_rows(database)] == left
    assert changed(stopping=Event()) is (stops == "while it writes")
    assert (_rows(database), _stones(database)) == (rows, stones)
    assert freeze_run(database, store, running, tmp_path).is_settled


def _rows(database: Database) -> list[tuple[Any, ...]]:
    table = Step.__table__
    with database.reading() as session:
        return [tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))]


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_an_interrupted_freeze_continues_only_with_its_file(
    database: Database, running: Run, tmp_path: Path, damage: str
) -> None:
    """Another storage may be set by then: the rows stay, which may be all that is left."""
    store = MemoryStore()
    make_history(database, running)
    with pytest.raises(freeze.Stopped):
        freeze.freeze(database, store, running.id, folder=tmp_path, stopping=_Stops(database))
    rows = rows_of(database, running)
    [key] = _keys(store)
    content = bytes(obstore.get(store, key).bytes())
    if damage == "missing":
        frozen_made.lose(store, key)
    else:
        obstore.put(store, key, bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(StepsUnreadable, match=key):
        freeze_run(database, store, running, tmp_path)
    assert rows_of(database, running) == rows
    obstore.put(store, key, content)
    with frozen_made.reading_files(database, store) as other:
        assert freeze_run(other, store, running, tmp_path).is_settled
        with other.reading() as session:
            assert len(series.raw_steps(session, running.id)["step"]) == 699


def test_the_file_before_a_lost_one_stays(
    database: Database, running: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was frozen twice it has all steps but those of the last attempt."""
    store = LocalStore(tmp_path)
    make_history(database, running)
    first = freeze_run(database, store, running, tmp_path)
    with frozen_made.reading_files(database, store) as other:
        end(other, begin_again(other, running))
        second = freeze_run(other, store, running, tmp_path)
    (tmp_path / second.key).unlink()
    monkeypatch.setattr(storage, "ORPHAN_SECONDS", 0.0)
    with pytest.raises(StepsUnreadable, match=second.key):
        freeze_run(database, store, running, tmp_path)
    assert _keys(store) == [first.key]


def test_a_freeze_does_not_fill_the_disk(database: Database, running: Run, tmp_path: Path) -> None:
    """Without room for its files it writes none: live runs are recorded on the same disk."""
    store = LocalStore(tmp_path / "data", mkdir=True)
    make_history(database, running)
    with database.writing() as session:
        session.get_one(Run, running.id).recorded_steps = 2**50
    with pytest.raises(OSError, match="bytes free, needed are") as caught:
        freeze.freeze(database, store, running.id, folder=tmp_path, stopping=Event())
    assert object_store.is_full(caught.value)
    assert (_keys(store), rows_of(database, running)) == ([], 699)


def test_summaries_of_lost_steps_are_not_rebuilt_without_them(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Without the record of a file only they have something of its steps, until told otherwise."""
    store = MemoryStore()
    make_history(database, running, 3000)
    row = freeze_run(database, store, running, tmp_path)
    with database.writing() as session:
        session.delete(session.get_one(FrozenSteps, row.id))
    stones, rows = _stones(database), rows_of(database, running)
    with pytest.raises(StepsMissing, match=f"{rows} of its 2,999"), database.writing() as session:
        pyramid.rebuild(session, running.id)
    assert _stones(database) == stones
    with database.writing() as session:
        pyramid.rebuild(session, running.id, lost=True)
        assert pyramid.count_steps(session.connection(), running.id) == rows


def test_summaries_are_rebuilt_from_a_copy_of_the_file(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """So the transaction, which reads all steps, does not wait for the store."""
    store = MemoryStore()
    make_history(database, running)
    row, stones = freeze_run(database, store, running, tmp_path), _stones(database)
    content = obstore.get(store, row.key).bytes()
    with TemporaryFile(dir=tmp_path) as copy:
        files = freeze.copied_steps(database, store, running.id, copy)
        frozen_made.lose(store, row.key)
        with database.writing() as session:
            session.connection(execution_options={"step_files": files})
            pyramid.rebuild(session, running.id)
    assert set(_stones(database)) <= set(stones)
    obstore.put(store, row.key, bytes(content)[:-1])
    with pytest.raises(StepsUnreadable, match=row.key), TemporaryFile(dir=tmp_path) as copy:
        freeze.copied_steps(database, store, running.id, copy)


def test_records_stay_if_the_store_has_no_file(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """A check with another folder or bucket deletes no record, unless told that all are lost."""
    store, other_store = MemoryStore(), MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    with database.reading() as session:
        wrong = mismatches(session, other_store)
    assert [mismatch.key for mismatch in wrong] == [row.key]
    with pytest.raises(Conflict, match="no file of frozen steps, but 1 are recorded"):
        mend(database, other_store, wrong)
    with database.reading() as session:
        assert session.scalars(select(FrozenSteps)).one().key == row.key
    mend(database, other_store, wrong, lost=True)
    with database.reading() as session:
        assert session.scalars(select(FrozenSteps)).all() == []


@pytest.mark.parametrize("damage", ["missing", "short", "altered"])
@pytest.mark.one_database
def test_a_damaged_file_costs_its_own_steps_only(
    database: Database, running: Run, tmp_path: Path, damage: str
) -> None:
    """Its readers name the file; without its record, charts and rows remain."""
    store = MemoryStore()
    make_history(database, running, 3000)
    row = freeze_run(database, store, running, tmp_path)
    content = bytes(obstore.get(store, row.key).bytes())
    if damage == "missing":
        frozen_made.lose(store, row.key)
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        altered = content[:middle] if damage == "short" else changed
        obstore.put(store, row.key, altered)
    with frozen_made.reading_files(database, store) as other, other.reading() as session:
        with pytest.raises(StepsUnreadable, match=row.key):
            series.raw_steps(session, running.id)
        run = session.get_one(Run, running.id)
        assert len(series.sparklines(session, [run])[run.id]) == 60
        wrong = mismatches(session, store, deep=True)
    assert [mismatch.key for mismatch in wrong] == [row.key]
    mend(database, store, wrong, lost=True)
    with database.reading() as session:
        window = windows.window(session, running.id, most=32)
        stored_bytes = session.get_one(Run, running.id).stored_bytes
    assert window is not None
    assert (window.first, window.last, window.total > 2900, stored_bytes) == (1, 3000, True, 0)


def test_mending_deletes_no_record_of_a_later_file(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """The run was frozen again since the files were compared."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    content = bytes(obstore.get(store, row.key).bytes())
    frozen_made.lose(store, row.key)
    with database.reading() as session:
        wrong = mismatches(session, store)
    obstore.put(store, row.key, content)
    with frozen_made.reading_files(database, store) as other:
        end(other, begin_again(other, running))
        later = freeze_run(other, store, running, tmp_path)
        mend(other, store, wrong)
        with other.reading() as session:
            assert session.scalars(select(FrozenSteps)).one().key == later.key
            assert session.get_one(Run, running.id).stored_bytes == 0
            assert len(series.raw_steps(session, running.id)["step"]) == 699


def test_a_run_starts_from_scratch_without_its_file(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """An attempt that repeats all steps needs none of them."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    frozen_made.lose(store, row.key)
    run = begin_again(database, running)
    with frozen_made.reading_files(database, store) as other:
        with other.writing() as session:
            telemetry.truncate(session, run.id, run.attempt, after=0)
        record(other, run, make_steps([0.5] * 400))
        end(other, run)
        with other.reading() as session:
            assert series.raw_steps(session, run.id)["loss"] == [0.5] * 400
        again = freeze_run(other, store, run, tmp_path)
        assert (again.attempt, again.step) == (2, 400)


@pytest.mark.parametrize("damage", ["missing", "altered"])
@pytest.mark.parametrize("after", [1, 511, 690, *extended([300, 560])])
def test_a_run_continues_without_its_file(
    database: Database,
    running: Run,
    tmp_path: Path,
    damage: str,
    after: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its new steps are recorded; of those in the file the last 100 are lost."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    content = bytes(obstore.get(store, row.key).bytes())
    if damage == "missing":
        frozen_made.lose(store, row.key)
    else:
        obstore.put(store, row.key, bytes(len(content) // 2) + content[len(content) // 2 :])
    run = begin_again(database, running)
    new = make_steps([0.5] * 200, first=after + 1, skipped=[after + 7])
    with frozen_made.reading_files(database, store) as other:
        with other.writing() as session:
            telemetry.truncate(session, run.id, run.attempt, after=after)
        record(other, run, new[:20], new[20:])
        end(other, run)
        with other.reading() as session:
            ended = session.get_one(Run, run.id)
            assert (ended.step, ended.skipped > 0) == (after + 200, True)
            assert session.scalars(select(FrozenSteps.step)).one() == after
            latest = windows.window(session, run.id, first=after + 1, last=after + 200, most=500)
        assert latest is not None
        assert latest.total == 200
    assert any(f"run {run.id} continues without" in each.message for each in caplog.records)
    obstore.put(store, row.key, content)
    with frozen_made.reading_files(database, store) as other:
        with other.writing() as session:
            pyramid.rebuild(session, run.id, lost=True)
        assert freeze_run(other, store, run, tmp_path).attempt == 2
        with other.reading() as session:
            steps = set(series.raw_steps(session, run.id, most=10**6)["step"])
    assert steps >= {*range(1, after - 99), *range(after + 1, after + 201)} - {100}
    assert max(steps) == after + 200


@pytest.fixture
def resumed(database: Database, running: Run, tmp_path: Path) -> tuple[Run, ObjectStore]:
    """A frozen run of which another attempt has begun, and the store."""
    store = MemoryStore()
    make_history(database, running)
    freeze_run(database, store, running, tmp_path)
    return begin_again(database, running), store


def _truncate(run: Run, session: Session) -> None:
    telemetry.truncate(session, run.id, run.attempt, after=300)


def _flush(run: Run, session: Session, *, first: int) -> None:
    steps = make_steps([1.0 + step % 9 for step in range(first - 1, first + 19)], first=first)
    telemetry.record(session, run.id, run.attempt, telemetry.Flush(steps=[steps]))


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (_truncate, {*range(1, 301)}),
        (partial(_flush, first=310), {*range(1, 701)}),  # which are repeated
        (partial(_flush, first=750), {*range(1, 701), *range(750, 770)}),
    ],
)
def test_no_transaction_waits_for_the_store(
    database: Database,
    resumed: tuple[Run, ObjectStore],
    change: Callable[[Run, Session], None],
    steps: set[int],
) -> None:
    """While a resume or a flush waits for it, another connection changes the same run."""
    run, store = resumed
    gate = Gate(store)
    url = database.engine.url.render_as_string(hide_password=False)
    gated = Database(url, StepFiles(gate.open_store))
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(frozen_steps.write, gated, partial(change, run))
        assert gate.is_reached.wait(60)
        frozen_made.change_meanwhile(database, run.id)
        gate.is_open.set()
        changing.result()
    with gated.reading() as session:
        found = series.raw_steps(session, run.id, most=10**6)["step"]
        assert session.get_one(Run, run.id).name == "changed meanwhile"
    assert set(found) == steps - {100}  # which was lost
    gated.dispose()


@pytest.mark.parametrize("becomes", ["another", "none"])
def test_a_file_may_be_replaced_while_it_is_read(
    database: Database, resumed: tuple[Run, ObjectStore], becomes: str
) -> None:
    """A resume then reads the new file, or none if its record is gone."""
    run, store = resumed
    calls = 0

    def wait(read: Callable[[], None]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            with database.writing() as session:
                row = session.scalars(select(FrozenSteps)).one()
                if becomes == "none":
                    session.delete(row)
                else:
                    content = obstore.get(store, row.key).bytes()
                    obstore.delete(store, row.key)
                    row.key = f"steps/{run.id}/0.parquet"
                    obstore.put(store, row.key, content)
        read()

    with frozen_made.reading_files(database, store) as other:
        if becomes == "none":
            with other.reading() as session:
                rows = session.scalars(select(Step.step).where(Step.step <= 300)).all()
        else:
            rows = [step for step in range(1, 301) if step != 100]
        frozen_steps.write(other, partial(_truncate, run), wait=wait)
        with other.reading() as session:
            assert series.raw_steps(session, run.id, most=10**6)["step"] == sorted(rows)
    assert calls > (becomes == "another")


def test_a_resume_needs_no_cache(
    database: Database, resumed: tuple[Run, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read for its transaction stays until it is committed, whatever others read."""
    monkeypatch.setattr(step_files, "MOST_FOOTERS", 0)
    monkeypatch.setattr(step_files, "CACHED_BYTES", 0)
    run, store = resumed
    with frozen_made.reading_files(database, store) as other:
        frozen_steps.write(other, partial(_truncate, run))
        with other.reading() as session:
            assert len(series.raw_steps(session, run.id)["step"]) == 299


@pytest.mark.parametrize("is_mount_point", [True, False])
def test_a_resume_waits_for_a_folder_that_is_not_mounted(
    database: Database, running: Run, tmp_path: Path, is_mount_point: bool
) -> None:
    """Its file is not lost: nothing is recorded, nor frozen, until the folder is there again."""
    store, steps = LocalStore(tmp_path), tmp_path / "steps"
    make_history(database, running)
    other_run = _another(database, running)
    freeze_run(database, store, running, tmp_path)
    run = begin_again(database, running)
    steps.rename(tmp_path / "away")
    if is_mount_point:
        steps.mkdir()
    with frozen_made.reading_files(database, store) as other:
        for _ in range(2):
            with pytest.raises(StorageUnreachable, match="mount it"):
                frozen_steps.write(other, partial(_truncate, run))
        with pytest.raises(StorageUnreachable, match="mount it"):
            freeze_run(other, store, other_run, tmp_path)
        assert list(tmp_path.glob("steps/*")) == []
        if is_mount_point:
            steps.rmdir()
        (tmp_path / "away").rename(steps)
        frozen_steps.write(other, partial(_truncate, run))
        with other.reading() as session:
            assert len(series.raw_steps(session, run.id)["step"]) == 299
        assert freeze_run(other, store, other_run, tmp_path).is_settled


def test_a_restored_file_is_read_again(database: Database, running: Run, tmp_path: Path) -> None:
    """Nothing of a damaged file is cached."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    content = bytes(obstore.get(store, row.key).bytes())
    with frozen_made.reading_files(database, store) as other, other.reading() as session:
        for damaged in (content[: len(content) // 4], bytes(1000) + content[1000:]):
            obstore.put(store, row.key, damaged)
            with pytest.raises(StepsUnreadable):
                series.raw_steps(session, running.id)
        obstore.put(store, row.key, content)
        assert len(series.raw_steps(session, running.id)["step"]) == 699


def test_a_damaged_column_is_not_cached(database: Database, running: Run, tmp_path: Path) -> None:
    """Bytes between two columns are cached unread; once the file is restored, they are right."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    content = bytes(obstore.get(store, row.key).bytes())
    file, files = StepFile(row.key, row.size_bytes, row.footer_sha256), StepFiles(lambda: store)
    expected = StepFiles(lambda: store).read(file, [(1, 60)], ["elapsed_ms", "loss"])
    _, end = files._footer(file).part(0, ["elapsed_ms"])
    obstore.put(store, row.key, content[: end - 1] + bytes([content[end - 1] ^ 1]) + content[end:])
    found = files.read(file, [(1, 60)], ["loss"])["loss"]
    with pytest.raises(StepsUnreadable, match=row.key):
        files.read(file, [(1, 60)], ["elapsed_ms"])
    assert (files._parts, files._parts_bytes) == ({}, 0)
    files.read(file, [(1, 60)], ["loss"])
    obstore.put(store, row.key, content)
    elapsed_ms = files.read(file, [(1, 60)], ["elapsed_ms"])["elapsed_ms"]
    np.testing.assert_array_equal(elapsed_ms, expected["elapsed_ms"])
    np.testing.assert_array_equal(found, expected["loss"])


class _Counted(StepFiles):
    """Counts round trips to the store, and their parts of files."""

    trips, parts = 0, 0

    def _request(self, file: StepFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        self.trips, self.parts = self.trips + 1, self.parts + len(spans)
        return super()._request(file, spans)


def test_a_window_takes_one_round_trip(database: Database, running: Run, tmp_path: Path) -> None:
    """Steps at both ends and summaries between them are read at once, after the footer."""
    store = MemoryStore()
    make_history(database, running, 3000)
    with database.reading() as session:
        expected = windows.window(session, running.id, first=700, last=2500, most=64)
    freeze_run(database, store, running, tmp_path)
    files = _Counted(lambda: store)
    other = Database(database.engine.url.render_as_string(hide_password=False), files)
    with other.reading() as session:
        assert windows.window(session, running.id, first=700, last=2500, most=64) == expected
    assert files.trips == 2
    assert files.parts > 20
    other.dispose()


@given(
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**16)), min_size=1, max_size=40),
    st.integers(0, 2**20),
)
def test_parts_of_a_file_are_read_by_few_requests(
    lengths: list[tuple[int, int]], lacking: int
) -> None:
    """Whatever the distances between them; a file that is too short is reported."""
    ends = np.cumsum(np.array(lengths).sum(axis=1)).tolist()
    spans = [(end - length, end) for end, (_, length) in zip(ends, lengths, strict=True)]
    content = np.random.default_rng(0).bytes(ends[-1])
    store = MemoryStore()
    obstore.put(store, "a", content)
    files, file = StepFiles(lambda: store), StepFile("a", len(content), "")
    assert files._request(file, spans) == [content[start:end] for start, end in spans]
    obstore.put(store, "a", content[: max(0, len(content) - 1 - lacking)])
    with pytest.raises((OSError, obstore.exceptions.BaseError)):
        files._request(file, spans)


def test_row_groups_are_cached_within_a_bound(
    database: Database, running: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest are read from memory, in a part or as a whole."""
    store = MemoryStore()
    make_history(database, running)
    row = freeze_run(database, store, running, tmp_path)
    file, files = StepFile(row.key, row.size_bytes, row.footer_sha256), StepFiles(lambda: store)
    footer = files._footer(file)
    spans = [(first, last) for first, last in footer.spans.tolist()[:3]]
    parts = [footer.part(group, NAMES) for group in (1, 2)]
    monkeypatch.setattr(step_files, "CACHED_BYTES", sum(end - start for start, end in parts))
    found = [files.read(file, [span]) for span in spans]
    frozen_made.lose(store, row.key)
    again = files.read(file, spans[1:])
    for name, values in again.items():
        expected = np.concatenate([found[1][name], found[2][name]])
        np.testing.assert_array_equal(values, expected)
    assert files.read(file, [spans[2]], ["loss"])["loss"].tolist() == found[2]["loss"].tolist()
    with pytest.raises(StepsUnreadable, match="missing"):
        files.read(file, [spans[0]])


@pytest.mark.one_database
def test_every_altered_bit_is_noticed(database: Database, running: Run, tmp_path: Path) -> None:
    """Reading a damaged file fails or returns the right steps."""
    store = MemoryStore()
    make_history(database, running, 130)
    row = freeze_run(database, store, running, tmp_path)
    content = bytes(obstore.get(store, row.key).bytes())
    file = StepFile(row.key, row.size_bytes, row.footer_sha256)
    intact = list(map(step_files.digest, StepFiles(lambda: store).groups(file)))
    failed = 0
    for bit in range(0, 8 * len(content), 97):
        altered = bytearray(content)
        altered[bit // 8] ^= 1 << bit % 8
        obstore.put(store, row.key, bytes(altered))
        try:
            found = list(map(step_files.digest, StepFiles(lambda: store).groups(file)))
        except StepsUnreadable:
            failed += 1
        else:
            assert found == intact
    assert failed > 500


def test_a_program_without_the_store_reports_it(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Nothing reads the remaining rows as if they were all."""
    make_history(database, running)
    freeze_run(database, MemoryStore(), running, tmp_path)
    with database.reading() as session, pytest.raises(StepsUnreadable, match="has not opened"):
        series.raw_steps(session, running.id)


def test_due_are_long_runs_that_ended_and_changed(
    database: Database, running: Run, tmp_path: Path
) -> None:
    """Not active, deleted, short or frozen runs, nor those of an open trial."""

    def due(days: float = 0.0) -> list[int]:
        with database.reading() as session:
            return freeze.due(session, days, most=5)

    record(database, running, make_steps([1.0] * 20))
    assert due() == []
    end(database, running)
    assert (due(), due(days=1.0)) == ([running.id], [])
    freeze_run(database, MemoryStore(), running, tmp_path)
    assert due() == []
    end(database, begin_again(database, running))
    assert due() == [running.id]
    with database.writing() as session:
        session.get_one(Run, running.id).deleted_at = 1.0
    assert due() == []


@pytest.mark.parametrize(("steps", "is_due"), [(9, False), (10, True)])
def test_due_are_runs_with_many_recorded_steps(
    database: Database, running: Run, steps: int, is_due: bool
) -> None:
    """The number of the last step may be much higher."""
    history = make_steps([1.0] * steps)
    history["step"] *= 1_000
    record(database, running, history)
    end(database, running)
    with database.reading() as session:
        assert freeze.due(session, 0.0, most=5) == [running.id] * is_due


@pytest.mark.one_database
def test_steps_may_be_far_apart(database: Database, running: Run, tmp_path: Path) -> None:
    """The latest steps stay rows, and are rows again after a resume, whatever their distance."""
    store, zooms = MemoryStore(), [(1_000, 130_000), (250_000, 690_000)]
    steps = make_steps([1.0 + step % 9 for step in range(700)])
    steps["step"] *= 1_000
    record(database, running, steps)
    end(database, running)
    with frozen_made.reading_files(database, store) as other:
        before = everything(other, running.id, zooms)
        freeze_run(other, store, running, tmp_path)
        _assert_same(everything(other, running.id, zooms), before)
        assert 100 <= rows_of(other, running) < 300
        with other.writing() as session:
            frozen_steps.truncate(session.connection(), running.id, after=400_500)
            latest = (Step.run_id == running.id, Step.step.between(301_000, 400_500))
            assert session.scalar(select(func.count()).where(*latest)) == 100
        plain = _resume(database, other, store, running, steps, 300_500, tmp_path, zooms)
        _assert_same(everything(other, running.id, zooms), plain)


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("has_diverged", [False, True])
def test_the_work_of_a_freeze_grows_with_the_steps(
    database: Database, running: Run, tmp_path: Path, has_diverged: bool
) -> None:
    """Four times the steps take SQLite about four times the instructions, not sixteen times."""
    counts, store = [], MemoryStore()
    for length in (1_000, 4_000):
        run = _another(database, running, length, has_diverged=has_diverged)
        with frozen_made.reading_files(database, store) as other:
            counter = itertools.count()
            # Every 100 instructions; a result other than 0 would interrupt.
            other.engine.raw_connection().driver_connection.set_progress_handler(  # type: ignore
                lambda counter=counter: 0 * next(counter), 100
            )
            freeze_run(other, store, run, tmp_path)
            assert rows_of(other, run) < 600 or has_diverged  # whose rows are flagged
        counts.append(next(counter))
    assert counts[0] > 100
    assert counts[1] < 6 * counts[0]


def _keys(store: ObjectStore) -> list[str]:
    return [meta["path"] for page in obstore.list(store, prefix="steps") for meta in page]


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.extended)])
def test_a_kill_at_any_point_loses_nothing(
    database: Database, running: Run, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between any two calls, all steps are readable, and the next freeze completes it."""
    monkeypatch.setattr(storage, "ORPHAN_SECONDS", 0.0)
    url = database.engine.url.render_as_string(hide_password=False)
    make_history(database, running)
    with frozen_made.Freezer(url, tmp_path) as freezer:
        points = freezer.freeze(running.id, None)
        assert points > 100
        step = max(1, points // kills)
        with frozen_made.reading_files(database, freezer.store) as other:
            for point in range(step, points, step):
                run = _another(database, running)
                before = everything(other, run.id, ZOOMS)
                assert freezer.freeze(run.id, point) == -signal.SIGKILL
                _assert_same(everything(other, run.id, ZOOMS), before)
                row = freeze_run(other, freezer.store, run, tmp_path)
                _assert_same(everything(other, run.id, ZOOMS), before)
                assert row.is_settled
                keys = [key for key in _keys(freezer.store) if f"/{run.id}/" in key]
                assert row.key in keys
                assert len(keys) <= 2  # the killed one may have stored a file
                assert rows_of(other, run) < 300


def _another(database: Database, run: Run, length: int = 700, *, has_diverged: bool = False) -> Run:
    """Make another run of the same values, with a history of its own."""
    with database.writing() as session:
        copy = session.get_one(Run, run.id)
        node = session.scalars(select(RunNode).where(RunNode.run_id == run.id)).first()
        assert node is not None
        for row in (copy, node):
            session.expunge(row)
            make_transient(row)
        copy.id, copy.status, copy.step, copy.stored_bytes = None, "running", 0, 0  # type: ignore
        copy.attempt, copy.skipped, copy.recorded_steps, copy.not_stepped = 1, 0, 0, 0
        session.add(copy)
        session.flush()
        node.run_id, node.attempt, node.ended_at = copy.id, 1, None
        session.add(node)
    make_history(database, copy, length, has_diverged=has_diverged)
    return copy


def test_a_file_of_a_newer_format_is_refused_with_both_numbers(
    database: Database, running: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of 0.1.0 have no number, and are read."""
    store = MemoryStore()
    make_history(database, running)
    with monkeypatch.context() as written:
        written.setattr(step_files, "FORMAT", 2)
        row = freeze_run(database, store, running, tmp_path)
    file = StepFile(row.key, row.size_bytes, row.footer_sha256)
    with pytest.raises(StepsUnreadable, match="has format 2; this version reads 1"):
        StepFiles(lambda: store).read(file, [(1, 60)], ["loss"])
    monkeypatch.setattr(step_files, "FORMAT_KEY", b"another")
    assert len(StepFiles(lambda: store).read(file, [(1, 60)], ["loss"])["loss"]) == 60
