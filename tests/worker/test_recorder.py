"""Recording over deaths: real spools, a real database, and no process."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore
from sqlalchemy import select

from db import queue
from db.database import Database
from db.series import raw_steps
from db.settings import Settings
from db.tables import Diagnosis, Metric, Run, RunNode, ScalerEvent, Status, User, Worker
from halfstep.spool import SpoolWriter
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit
from tests.db.telemetry_made import make_events, make_metric, make_steps
from worker.recorder import Recorder


class NoDevices:
    """Stands for a machine's sampler: what is recorded here are trainings."""

    def take(self) -> list[dict[str, Any]]:
        return []


class Attempts:
    """One run, and the machines that train it, each with a data folder of its own.

    The loss of every step is the number of the attempt that made it.
    """

    def __init__(self, database: Database, folder: Path, owner: User) -> None:
        self.database, self.folder = database, folder
        self.closing = ExitStack()
        self.workers: dict[str, Worker] = {}
        self.number = 0
        with database.writing() as session:
            self.run_id = submit(session, owner).id

    def next(self, machine: str = "a", **options: Any) -> SpoolWriter:
        """Give up the attempt that runs, if one does; return the spool of the next one's."""
        if machine not in self.workers:
            self.workers[machine] = add_worker(self.database, machine, [DIGITS], [CPU])
        with self.database.writing() as session:
            if self.number:
                queue.end(session, self.run_id, self.number, Status.QUEUED)
            run = claim(session, self.workers[machine])
            assert run is not None
            self.number = run.attempt
        self.settings = Settings(data=self.folder / machine)
        spool = self.settings.run_folder(self.run_id) / "spool"
        return self.closing.enter_context(SpoolWriter(spool, self.number, **options))

    def steps(self, first: int, last: int) -> Any:
        return make_steps([float(self.number)] * (last - first + 1), first=first)

    def recorder(self) -> Recorder:
        """A recorder as a worker makes it, to record what a dead supervisor left."""
        store = LocalStore(self.settings.data, mkdir=True)
        return Recorder(self.settings, self.database, store, self.run_id, self.number)

    def supervisor(self) -> Recorder:
        """A recorder as a supervisor makes it: what was left is recorded, its training begins."""
        recorder = self.recorder()
        drain(recorder)
        recorder.begin(NoDevices(), 0.0, {})  # type: ignore[arg-type]
        return recorder

    def made_by(self) -> dict[int, int]:
        """By which attempt each recorded step was made."""
        with self.database.reading() as session:
            steps = raw_steps(session, self.run_id)
        return dict(zip(steps["step"], map(int, steps["loss"]), strict=True))

    def steps_of(self, table: Any) -> list[int]:
        with self.database.reading() as session:
            return list(session.scalars(select(table.step).order_by(table.step)))

    def left(self) -> list[str]:
        """The names of the spool files on the machine that trains."""
        folder = self.settings.run_folder(self.run_id) / "spool"
        return sorted(path.name for path in folder.iterdir())

    def resumed_steps(self) -> list[int | None]:
        """From which step on each attempt recorded; the last also stands in the run's row."""
        with self.database.reading() as session:
            nodes = select(RunNode.resumed_step).order_by(RunNode.attempt)
            found = list(session.scalars(nodes))
            assert session.get_one(Run, self.run_id).resumed_step == found[-1]
        return found


def drain(recorder: Recorder) -> None:
    while not recorder.flush():
        pass


def resumed(step: int, *, exact: bool) -> dict[str, Any]:
    notes = [] if exact else ["another device"]
    return {"event": "resumed", "step": step, "exact": exact, "notes": notes}


def span(first: int, last: int, attempt: int) -> dict[int, int]:
    return dict.fromkeys(range(first, last + 1), attempt)


@pytest.fixture
def attempts(database: Database, tmp_path: Path, ada: User) -> Iterator[Attempts]:
    """A run in the queue."""
    attempts = Attempts(database, tmp_path, ada)
    with attempts.closing:
        yield attempts


@pytest.mark.parametrize("exact", [True, False])
def test_a_dead_supervisor_of_a_resumed_run_takes_nothing_with_it(
    attempts: Attempts, exact: bool
) -> None:
    """What earlier attempts and its own recorded stays; what its training spooled is added."""
    spool = attempts.next()
    spool.steps(attempts.steps(1, 50))
    spool.event(make_metric(40, 0.5))
    first = attempts.supervisor()
    drain(first)
    first.clear()
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.event(resumed(50, exact=exact))
    spool.steps(attempts.steps(51, 70))
    drain(recorder)
    spool.steps(attempts.steps(71, 80))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 50, 1) | span(51, 80, 2)
    assert attempts.steps_of(Metric) == [40]
    assert attempts.resumed_steps() == [0, 50]


@pytest.mark.parametrize(("exact", "kept"), [(True, 60), (False, 55)])
def test_a_supervisor_that_died_before_it_recorded_is_stood_in_for(
    attempts: Attempts, exact: bool, kept: int
) -> None:
    """The worker learns from the spool from which step on the training replaces earlier ones."""
    spool = attempts.next()
    spool.steps(attempts.steps(1, 60))
    first = attempts.supervisor()
    drain(first)
    first.clear()
    spool = attempts.next()
    spool.event(resumed(50, exact=exact))
    spool.steps(attempts.steps(51, 55))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 50, 1) | span(51, 55, 2) | span(56, kept, 1)
    assert attempts.resumed_steps() == [0, 50]


def test_a_dead_supervisor_keeps_what_its_spool_no_longer_has(attempts: Attempts) -> None:
    """Neither a scale set by hand nor a spool that was rotated away costs a first attempt steps."""
    spool = attempts.next(rotate_bytes=17)
    [event] = [event for event in make_events([5]) if event["kind"] == "skip"]
    spool.event(event | {"kind": "set"})
    spool.steps(attempts.steps(1, 50))
    recorder = attempts.supervisor()
    drain(recorder)
    spool.steps(attempts.steps(51, 70))
    drain(recorder)
    spool.event(make_metric(71, 0.5))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 70, 1)
    assert attempts.steps_of(ScalerEvent) == [5]
    assert attempts.steps_of(Metric) == [71]


def test_what_two_attempts_left_is_recorded_one_after_the_other(attempts: Attempts) -> None:
    """Steps of the earlier one that the later did not repeat bit for bit are gone."""
    attempts.next().steps(attempts.steps(1, 60))
    spool = attempts.next()
    spool.event(resumed(50, exact=False))
    spool.steps(attempts.steps(51, 55))
    drain(attempts.recorder())
    assert attempts.made_by() == span(1, 50, 1) | span(51, 55, 2)


def test_what_a_superseded_attempt_left_is_deleted_unread(attempts: Attempts) -> None:
    """A machine that comes back with an old attempt's spool changes nothing of the newer one's."""
    old = attempts.next("a")
    old.steps(attempts.steps(1, 180))
    old.event(make_metric(150, 0.5))
    spool = attempts.next("b")
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 120))
    drain(recorder)
    spool = attempts.next("a")
    recorder = attempts.supervisor()
    assert attempts.made_by() == span(1, 120, 2)
    assert attempts.steps_of(Metric) == []
    spool.event(resumed(100, exact=False))
    spool.steps(attempts.steps(101, 110))
    drain(recorder)
    assert attempts.made_by() == span(1, 100, 2) | span(101, 110, 3)
    assert attempts.left() == ["3-0.spool"]


def test_what_an_attempt_after_the_last_recorded_left_is_not_lost(attempts: Attempts) -> None:
    """Only what is older than recorded steps is given up."""
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 50))
    drain(recorder)
    spool.steps(attempts.steps(51, 60))
    spool = attempts.next()
    spool.event(resumed(60, exact=True))
    spool.steps(attempts.steps(61, 70))
    attempts.next()
    attempts.supervisor()
    assert attempts.made_by() == span(1, 60, 1) | span(61, 70, 2)


def test_what_is_told_before_the_first_steps_survives_a_resume_that_is_not_exact(
    attempts: Attempts,
) -> None:
    """An attempt's first events wait for its first steps, before which the earlier ones go."""
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.steps(attempts.steps(1, 60))
    for event in (*make_events([54]), make_metric(55, 0.5)):
        spool.event(event)
    drain(recorder)
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.event(resumed(50, exact=False))
    spool.event({"event": "shapes", "step": 0})
    for event in (*make_events([51]), make_metric(52, 0.5)):
        spool.event(event)
    drain(recorder)
    assert attempts.steps_of(Diagnosis) == [0]  # of no step: there is nothing to wait for
    assert attempts.steps_of(ScalerEvent) == [54, 54]
    spool.steps(attempts.steps(51, 52))
    drain(recorder)
    assert attempts.steps_of(ScalerEvent) == [51, 51]
    assert attempts.steps_of(Metric) == [52]
    spool.event(make_metric(53, 0.5))
    drain(recorder)
    assert attempts.steps_of(Metric) == [52, 53]  # once it has made steps, nothing waits


def test_what_an_attempt_without_steps_told_is_forgotten(attempts: Attempts) -> None:
    """Events whose steps were never spooled are not laid over an earlier attempt's."""
    spool = attempts.next()
    spool.steps(attempts.steps(1, 60))
    spool.event(make_metric(55, 0.5))
    drain(attempts.supervisor())
    spool = attempts.next()
    recorder = attempts.supervisor()
    spool.event(resumed(50, exact=False))
    spool.event(make_metric(52, 0.5))
    drain(recorder)
    drain(attempts.recorder())
    assert attempts.steps_of(Metric) == [55]
