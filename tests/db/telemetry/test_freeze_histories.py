"""A run that is frozen again and again reads like one that never is, whatever happens to it."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from obstore.store import MemoryStore
from sqlalchemy import select
from sqlalchemy.orm import make_transient

from db.database import Database
from db.errors import Conflict
from db.files import storage
from db.tables import Run, RunNode
from db.telemetry import export, freeze, frozen_steps, pyramid, series, telemetry, unfreeze, windows
from halfstep.telemetry.events import RolledBack
from tests.db.telemetry import frozen_made
from tests.db.telemetry.frozen_made import StopsLate, begin_again, end
from tests.db.telemetry.telemetry_made import make_events, make_steps, step_event

FIELDS = ("step", "elapsed_ms", "loss", "scale", "grad_norm", "grad_norm_clipped", "lr", "flags")
SPANS = [(None, None), (1, 64), (100, 700), (513, 1024), (600, None)]
counter = itertools.count(1)


class Action(NamedTuple):
    """What happens to both runs. at: a share of the steps so far."""

    kind: str
    at: float
    length: int


KINDS = ("record", "gap", "resume", "repeat", "roll back", "rebuild", "freeze", "stop", "unfreeze")
actions = st.builds(
    Action,
    st.sampled_from(KINDS),
    st.floats(0, 1),
    st.integers(1, 400),
)


class History:
    """Two runs to which the same happens, of which one is also frozen."""

    def __init__(self, database: Database, run: Run, store: MemoryStore, folder: Path) -> None:
        self._database, self._store, self._folder = database, store, folder
        self.runs = [self._copy(run) for _ in range(2)]
        self._values: dict[int, NDArray[Any]] = {}  # the latest row of each step
        self._last, self._is_active, self._seed = 0, True, 0

    def apply(self, action: Action) -> None:
        """Let something happen."""
        at = int(self._last * action.at)
        match action.kind:
            case "record":
                self._record(range(self._last + 1, self._last + 1 + action.length))
            case "gap":
                first = self._last + 1 + action.length
                self._record(range(first, first + 70))
            case "resume":
                self._begin()
                for run in self.runs:
                    self._truncate(run, at)
                self._forget(at)
                self._record(range(at + 1, at + 1 + action.length))
            case "repeat":
                self._begin()
                self._record(range(at + 1, min(at + action.length, self._last) + 1), again=True)
            case "roll back":
                self._activate()
                event = RolledBack(
                    step=at,
                    rollbacks=1,
                    from_step=self._last,
                    loss=9.0,
                    z=5.0,
                    spike=at + 1,
                    examples=1,
                )
                for run in self.runs:
                    frozen_steps.write(
                        self._database,
                        lambda session, run=run: telemetry.take_back(  # type: ignore[misc]
                            session, run.id, run.attempt, event
                        ),
                    )
                self._forget(at)
            case "rebuild":
                for run in self.runs:
                    with self._database.writing() as session:
                        pyramid.rebuild(session, run.id)
            case "unfreeze":
                self._end()
                stopping = StopsLate(action.length // 50 if action.length % 2 else 10**9)
                with suppress(freeze.Stopped, Conflict):
                    unfreeze.unfreeze(
                        self._database, self._store, self.runs[1].id, stopping=stopping
                    )
            case "freeze" | "stop":
                self._end()
                pauses = action.length // 5 if action.kind == "stop" else 10**9
                with suppress(freeze.Stopped):
                    freeze.freeze(
                        self._database,
                        self._store,
                        self.runs[1].id,
                        folder=self._folder,
                        stopping=StopsLate(pauses),
                    )

    def steps(self) -> list[int]:
        """Return the steps that were recorded and neither truncated nor rolled back."""
        return sorted(self._values)

    def read(self, run: Run) -> Iterator[tuple[str, str]]:
        """Yield what readers return of a run."""
        with self._database.reading() as session:
            yield "raw", repr(series.raw_steps(session, run.id, most=10**6))
            for (first, last), most in itertools.product(SPANS, (32, 300)):
                window = windows.window(session, run.id, first=first, last=last, most=most)
                yield f"{first} {last} {most}", repr(window)
            row = session.get_one(Run, run.id)
            yield "counts", repr((row.step, row.skipped, row.not_stepped, row.loss, row.zero_steps))
            changes = series.changes(session, run.id, series.Cursor(), most=50)
            yield "latest", repr(changes and changes.steps)
            yield "speed", repr(pyramid.steps_per_second(session.connection(), run.id))
        yield "csv", repr(b"".join(export.as_csv(self._database, run.id, "steps")))

    def _copy(self, run: Run) -> Run:
        with self._database.writing() as session:
            copy = session.get_one(Run, run.id)
            node = session.scalars(select(RunNode).where(RunNode.run_id == run.id)).first()
            assert node is not None
            for row in (copy, node):
                session.expunge(row)
                make_transient(row)
            copy.id = None  # type: ignore[assignment]
            session.add(copy)
            session.flush()
            node.run_id = copy.id
            session.add(node)
        return copy

    def _record(self, steps: range, *, again: bool = False) -> None:
        self._activate()
        self._seed += not again
        made = make_steps([float(self._seed) + step % 13 for step in steps], first=steps.start)
        rng = np.random.default_rng([self._seed, steps.start])
        made["loss"][rng.random(len(made)) < 0.02] = rng.choice([np.nan, np.inf, -0.0])
        made["grad_norm"] = rng.random(len(made), np.float32)
        skipped = [step for step in steps if step % 97 == self._seed]
        for step in skipped:
            made["flags"][step - steps.start] = 1
        if again:
            known = [self._values[step] for step in steps if step in self._values]
            made = np.array(known, made.dtype)
        if not len(made):
            return
        for step, row in zip(made["step"].tolist(), made, strict=True):
            self._values[step] = row.copy()
        parts = [part for part in np.array_split(made, 3) if len(part)]
        events = [step_event(each) for each in make_events(skipped if not again else [])]
        for run in self.runs:
            for part in parts:
                flush = telemetry.Flush(steps=[part], events=events)
                frozen_steps.write(
                    self._database,
                    lambda session, run=run, flush=flush: telemetry.record(  # type: ignore[misc]
                        session, run.id, run.attempt, flush
                    ),
                )
        self._last = max(self._last, *made["step"].tolist())

    def _truncate(self, run: Run, after: int) -> None:
        frozen_steps.write(
            self._database,
            lambda session: telemetry.truncate(session, run.id, run.attempt, after=after),
        )

    def _forget(self, after: int) -> None:
        self._values = {step: row for step, row in self._values.items() if step <= after}
        self._last = after

    def _activate(self) -> None:
        if not self._is_active:
            self._begin()

    def _begin(self) -> None:
        self._end()
        self.runs = [begin_again(self._database, run) for run in self.runs]
        self._is_active = True

    def _end(self) -> None:
        if self._is_active:
            for run in self.runs:
                end(self._database, run)
        self._is_active = False


@pytest.mark.slow
@given(st.lists(actions, min_size=2, max_size=9))
@settings(
    max_examples=settings.default.max_examples // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_frozen_run_reads_like_any_other(
    database: Database,
    running: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    history: list[Action],
) -> None:
    """After each of some resumes, rollbacks, gaps and freezes, of which some are interrupted."""
    monkeypatch.setattr(freeze, "GROUP_STEPS", 128)
    monkeypatch.setattr(freeze, "BATCH_ROWS", 50)
    monkeypatch.setattr(unfreeze, "BATCH_ROWS", 50)
    monkeypatch.setattr(storage, "ORPHAN_SECONDS", 0.0)
    store = MemoryStore()
    # The database has records of files from the examples before.
    obstore.put(store, "steps/0/of-another-example.parquet", b"")
    with frozen_made.reading_files(database, store) as other:
        both = History(other, running, store, tmp_path)
        for action in history:
            both.apply(action)
            plain, frozen = (dict(both.read(run)) for run in both.runs)
            for name, value in plain.items():
                assert frozen[name] == value, (action, name)
            assert eval(plain["raw"])["step"] == both.steps()
