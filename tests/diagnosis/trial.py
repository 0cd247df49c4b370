"""Trials of loops: unwatched and watched runs with the same seeds, and the diagnosis.

The watched run is written offline; its folder is recorded in an empty SQLite database, as the
server records an upload, and diagnosed there.
"""

import atexit
import contextlib
import io
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from db.access import accounts
from db.database import Database
from db.health import findings
from db.health.scaling_health import ScalingHealth, scaling_health
from db.queue import claims, queue, workers
from db.runs import runs as run_rows
from db.tables import Run, Status, WatchedAttempt
from db.telemetry import ingest
from db.telemetry.recording import Recording
from halfstep.diagnosis.finding import Finding
from halfstep.evidence import input_evidence
from halfstep.recording import ring
from halfstep.run_config import parse_config
from halfstep.session import active_run, run_start, watch_session
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.events import Artifact
from halfstep.telemetry.plain_json import json_safe
from halfstep.telemetry.run_folder import read_outcome, read_run
from halfstep.telemetry.spool import SpoolReader, Unrecordable
from tests import warm
from tests.diagnosis.parts import DEVICE
from tests.diagnosis.recipes.cases import train_recipe
from tests.diagnosis.registry import HEALTHY, LOOPS, Handle, Loop
from tests.diagnosis.truth import Truth, observe
from tests.diagnosis.unwatched import Ended, Unwatched, run
from tests.spool_made import events_of

ROOT = Path(__file__).parents[2]
#: Whether watched loops are to be diagnosed as those on a GPU are.
IS_UNREADABLE = os.environ.get("HALFSTEP_DIAGNOSIS_DEVICE") == "unreadable"
RANK_SECONDS = 120  # a busy machine is no fault


@dataclass
class Trial:
    """The result of a trial."""

    loop: Loop
    unwatched: Ended
    watched: Ended
    findings: list[Finding] = field(default_factory=list)
    health: ScalingHealth | None = None
    reported: str = ""  # what `watch` printed

    @property
    def causes(self) -> list[str]:
        """Return the registered causes of findings in order."""
        return [each for finding in self.findings if (each := cause_of(finding))]

    @property
    def is_same(self) -> bool:
        """Whether watching has changed no bit and no exception."""
        return self.watched.is_same(self.unwatched)

    @property
    def named(self) -> str:
        """Return how the true cause was named: right, partly, wrong or none. For a healthy loop
        any cause is wrong.
        """
        causes = self.causes
        if self.loop.cause == HEALTHY:
            return "wrong" if causes else "right"
        right = {self.loop.cause, *self.loop.accepts}
        if not causes:
            return "none"
        return "right" if causes[0] in right else "partly" if right & set(causes) else "wrong"


def cause_of(finding: Finding) -> str:
    """Return the slug of a finding's cause, or "" if it only informs."""
    return str(getattr(finding, "cause", ""))


def attempt(loop: Loop, *, is_unreadable: bool = IS_UNREADABLE) -> Trial:
    """Try a loop.

    is_unreadable: watch it like one on a GPU, whose tensors the host cannot read at once.
    """
    if loop.recipe is not None:
        return _of_recipe(loop)
    with tempfile.TemporaryDirectory(prefix="halfstep-trial-") as folder:
        runs = Path(folder) / "runs"
        if loop.processes > 1:
            unwatched, watched = _apart(loop, Path(folder), runs)
            result = ""
        else:
            unwatched = run(loop, Unwatched())
            unwatched.exception = None
            printed = io.StringIO()
            place = unreadable() if is_unreadable else contextlib.nullcontext()
            with contextlib.redirect_stderr(printed), place:
                watched = run_watched(loop, runs)
            result = printed.getvalue()
        trial = Trial(loop, unwatched, watched, reported=result)
        for each in sorted(runs.glob("*/run.json")):
            with open_recorded(each.parent) as (session, row):
                trial.findings += findings.of_run(session, row)
                trial.health = scaling_health(session, row) or trial.health
        return trial


@cache
def try_loop(name: str) -> Trial:
    """Return a loop's trial, shared by several tests."""
    return attempt(LOOPS[name])


def run_watched(loop: Loop, runs: Path) -> Ended:
    """Train a watched loop, with its run in this folder."""
    opened: list[watch_session.Watch] = []

    def watch(*modules: Any, **options: Any) -> Handle:
        handle = run_start.watch(*modules, **{"mode": "offline", "folder": runs, **options})
        opened.append(handle)
        return handle

    ended = run(loop, watch)
    if opened and (error := ended.exception):
        opened[-1].__exit__(type(error), error, error.__traceback__)
    if opened:
        opened[-1].finish()
    ended.exception = None  # with all that its frames hold
    assert active_run.active is None
    return ended


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Make `watch` treat tensors in host memory like a device's."""
    init = ring.Ring.__init__

    def of_a_device(self: ring.Ring, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.readable = None

    with (
        patch.object(torch.Tensor, "is_cpu", False),
        patch.object(ring, "EAGER_SHARE", math.inf),
        patch.object(input_evidence, "EXAMINED_SHARE", math.inf),
        patch.object(ring.Ring, "__init__", of_a_device),
    ):
        yield


@contextlib.contextmanager
def open_recorded(folder: Path) -> Iterator[tuple[Any, Run]]:
    """Yield a session of a database with a recorded run, and its row."""
    with _database() as database:
        with database.writing() as session:
            run_id = record(session, folder)
        with database.reading() as session:
            yield session, session.get_one(Run, run_id)


@contextlib.contextmanager
def _database() -> Iterator[Database]:
    """Yield an empty database."""
    with tempfile.TemporaryDirectory(prefix="halfstep-trial-") as place:
        path = Path(place) / "halfstep.db"
        shutil.copy(_migrate(), path)
        database = Database(f"sqlite:///{path}")
        try:
            yield database
        finally:
            database.dispose()


def record(session: Any, folder: Path) -> int:
    """Record a run's folder as the server does, attempt by attempt; return the run's id."""
    described = read_run(folder)
    ada = accounts.user_named(session, "ada")
    run_id = 0
    for written in described.attempts:
        number = written.attempt
        place = ingest.begin(
            session,
            ada,
            described.id,
            number,
            name=described.name,
            project=described.project or "",
            config=json_safe(described.config or {}),
            tags=", ".join(described.tags),
            started_at=datetime.fromisoformat(described.started).timestamp(),
            host=written.host,
            versions=written.versions,
        )
        run_id = place.run_id
        _record_attempt(session, place, folder, number)
        files = AttemptFiles(folder, number)
        if outcome := read_outcome(files, lives=False):
            how, exit_code = outcome.status, outcome.exit_code
            step, error = outcome.step, outcome.error
            ingest.end(
                session, ada, run_id, number, how, step=step, error=error, exit_code=exit_code
            )
        session.flush()
    return run_id


def _record_attempt(session: Any, place: WatchedAttempt, folder: Path, number: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        for path in (folder / "spool").glob(f"{number}-*.spool"):
            shutil.copy(path, own)
        reader = SpoolReader(Path(own))
        while items := reader.poll():
            faults = [item for item in items if isinstance(item, Unrecordable)]
            assert not faults, faults
            run, _ = ingest.lock_attempt(session, *_sender(session, place))
            position = reader.position()
            assert position is not None
            ingest.record(session, run, place, items, end=(position.sequence, position.offset))


def _sender(session: Any, place: WatchedAttempt) -> tuple[Any, int, int]:
    return accounts.user_named(session, "ada"), place.run_id, place.attempt


def events(folder: Path) -> list[dict[str, Any]]:
    """Return a run's events from its spool."""
    reader, result = SpoolReader(folder / "spool"), []
    while items := reader.poll():
        result += events_of(items)
    return result


@cache
def _migrate() -> Path:
    """Return the path of a migrated empty database, which each trial copies."""
    folder = tempfile.mkdtemp(prefix="halfstep-migrated-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "halfstep.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.dispose()
    return path


def _apart(loop: Loop, folder: Path, runs: Path) -> tuple[Ended, Ended]:
    """Train a loop of several processes; return all ranks' ends, unwatched and watched."""
    both = Ended(), Ended()
    for rank, results in enumerate(_of_ranks(loop, folder, str(runs))):
        for whole, ended in zip(both, results, strict=True):
            whole.error += ended.error
            whole.moved += ended.moved
            whole.state |= {f"rank {rank} {name}": value for name, value in ended.state.items()}
    return both


def truths(loop: Loop) -> list[tuple[Truth, Truth]]:
    """Return each rank's ground truth of a loop, with its precision and in fp32."""
    if loop.processes == 1:
        return [(observe(loop), observe(loop, fp32=True))]
    with tempfile.TemporaryDirectory(prefix="halfstep-trial-") as folder:
        return [(seen, in_fp32) for seen, in_fp32 in _of_ranks(loop, Path(folder))]


def _of_ranks(loop: Loop, folder: Path, *arguments: str) -> Iterator[list[Any]]:
    """Start a process for each rank; yield their results."""
    script = str(Path(__file__).with_name("rank.py"))
    ranks = [
        warm.Popen(
            [
                *(sys.executable, script, loop.name, str(loop.processes), str(rank)),
                *(str(folder / "store"), str(folder / f"{rank}.pt"), *arguments),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(loop.processes)
    ]
    try:
        printed = [each.communicate(timeout=RANK_SECONDS)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, printed[rank]
        yield torch.load(folder / f"{rank}.pt", weights_only=False)


# ---- Recipes -------------------------------------------------------------------------------------


def _of_recipe(loop: Loop) -> Trial:
    """Train a recipe like a worker, without its processes, and record its events."""
    assert loop.recipe is not None
    items: list[Any] = []
    unwatched = run(loop, Unwatched())
    result = replace(
        loop,
        train=lambda watch: train_recipe(loop.recipe, {"precision": loop.precision}, watch, items),
    )
    trial = Trial(loop, unwatched, run(result, Unwatched()))
    with _database() as database:
        with database.writing() as session:
            run_id = _record_recipe(session, loop, items)
        with database.reading() as session:
            row = session.get_one(Run, run_id)
            trial.findings, trial.health = (
                findings.of_run(session, row),
                scaling_health(session, row),
            )
    return trial


def _record_recipe(session: Any, loop: Loop, items: list[Any]) -> int:
    recipe = loop.recipe
    assert recipe is not None
    config = parse_config(recipe, {"precision": loop.precision}).model_dump(mode="json")
    device = {"kind": DEVICE, "index": 0, "memory_bytes": 8 * 2**30, "fp16": True, "bf16": True}
    offer = {"name": recipe.name, "title": recipe.title, "description": "", "schema": {}}
    ada = accounts.user_named(session, "ada")
    worker = workers.register(
        session, name="w1", host="host", pid=1, devices=[device], recipes=[offer], versions={},
        offers_commands=False,
    )  # fmt: skip
    run_rows.submit(session, owner=ada, recipe=recipe.name, config=config)
    row = claims.claim(
        session, worker.id, recipes=[recipe.name], precisions=[loop.precision], free_devices=[0],
        lease_seconds=60.0,
    )  # fmt: skip
    assert row is not None
    recording = Recording(row.id, row.attempt, has_begun=False, last_line=0)
    kept = [item for item in items if not isinstance(item, Artifact)]
    recording.take(kept)
    recording.write(session, [], [])
    queue.end(session, row.id, row.attempt, Status.FINISHED)
    return row.id
