"""Files of ended runs that retention rules delete."""

from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore
from sqlalchemy import func, select, update

from db.database import Database
from db.errors import Invalid
from db.files import checkpoints, pruning
from db.files.pruning import Rules
from db.queue import queue, run_control
from db.runs import runs
from db.runs.trash import DAY_SECONDS
from db.tables import CheckpointFile, LogLine, Run, Status, SystemSample, User
from db.telemetry import step_conversion
from tests.db.conftest import config, submit
from tests.db.files.checkpoints_made import make_saved
from tests.db.telemetry import earlier_metrics
from tests.db.telemetry.telemetry_made import make_metric, record
from tests.spool_made import checkpoint_of


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", mkdir=True)


@pytest.fixture
def old(database: Database, running: Run, store: LocalStore) -> int:
    """A run that ended 40 days ago, with checkpoints at 10 to 50, of which 30 is the best."""
    values = {step: 1.0 if step == 30 else 0.1 for step in range(10, 60, 10)}
    record(database, running, events=[make_metric(*point) for point in values.items()])
    with database.writing() as session:
        for step in values:
            key = f"runs/{running.id}/checkpoints/{step}.pt"
            obstore.put(store, key, b"x" * 10)
            checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(step)), [key])
        line: dict[str, Any] = {"attempt": 1, "time": 0.0, "stream": "stdout", "text": "x"}
        session.add(LogLine(run_id=running.id, number=1, **line))
        session.add(SystemSample(run_id=running.id, device=-1, elapsed_ms=1))
        queue.end(session, running.id, 1, Status.FINISHED)
        run = runs.get(session, running.id)
        run.config = config() | {"checkpoints": {"keep_best": "val/accuracy"}}
        run.ended_at -= 40 * DAY_SECONDS
        before = CheckpointFile.created_at - 40 * DAY_SECONDS
        session.execute(update(CheckpointFile).values(created_at=before))
    return running.id


def test_a_run_that_is_being_converted_keeps_its_checkpoints(database: Database, old: int) -> None:
    """A run keeps its checkpoints until it is converted, since its best step is unknown."""
    with database.reading() as session:
        earlier_metrics.as_rows(database, runs.get(session, old))
    with database.reading() as session:
        assert list(pruning.plan(session, Rules(checkpoint_days=30))) == []
    step_conversion.convert(database, old)
    with database.reading() as session:
        [planned] = pruning.plan(session, Rules(checkpoint_days=30))
    assert planned.steps == [10, 20, 40]


def test_old_checkpoints_are_previewed_and_deleted(
    database: Database, old: int, store: LocalStore
) -> None:
    """An age rule deletes old checkpoints except the last and the best, as previewed."""
    rules = Rules(checkpoint_days=30, log_days=30)
    with database.reading() as session:
        [planned] = pruning.plan(session, rules)
        assert len(checkpoints.of_run(session, old)) == 5
    assert (planned.steps, planned.stored_bytes) == ([10, 20, 40], 30)
    assert planned.in_words == "3 steps' checkpoints, 1 log line, 1 sample of the machine"
    assert pruning.prune(database, store, old, rules) == planned
    assert not pruning.prune(database, store, old, rules)
    with database.reading() as session:
        assert sorted(row.step for row in checkpoints.of_run(session, old)) == [30, 50]
        assert runs.get(session, old).stored_bytes == 20
        assert list(pruning.plan(session, rules)) == []
        for table in (LogLine, SystemSample):
            assert session.scalar(select(func.count()).select_from(table)) == 0
        assert runs.statuses(session, old)[-1].reason == (
            "deleted because of their age: 3 steps' checkpoints, 1 log line, "
            "1 sample of the machine"
        )
    left = [meta["path"] for page in obstore.list(store) for meta in page]
    assert sorted(left) == [f"runs/{old}/checkpoints/{step}.pt" for step in (30, 50)]


def test_pinned_runs_and_parents_of_forks_keep_all(
    database: Database, old: int, store: LocalStore, ada: User
) -> None:
    """Checkpoints of pinned runs and of forks' parents are kept, even if planned for deletion."""
    rules = Rules(checkpoint_days=30, log_days=30)
    with database.writing() as session:
        runs.get(session, old).tags = "a, pinned"
    with database.reading() as session:
        assert list(pruning.plan(session, rules)) == []
    with database.writing() as session:
        runs.get(session, old).tags = "pinned-not"
    with database.reading() as session:
        assert len(list(pruning.plan(session, rules))) == 1
    with database.writing() as session:
        submit(session, ada, config=config(200), parent_id=old, parent_step=20)
    with database.reading() as session:
        assert list(pruning.plan(session, rules)) == []
    assert not pruning.prune(database, store, old, rules)


def test_parents_of_measurements_keep_all_until_their_end(
    database: Database, old: int, store: LocalStore, ada: User
) -> None:
    """Parents of a measurement keep their checkpoints until it has ended."""
    rules = Rules(checkpoint_days=30, log_days=30)
    with database.writing() as session:
        lab = {"task": "precision_diff", "checkpoints": ["20"]}
        options = {"parent_id": old, "parent_step": 20}
        measuring = submit(session, ada, config=config(200) | {"lab": lab}, **options)
    with database.reading() as session:
        assert list(pruning.plan(session, rules)) == []
    assert not pruning.prune(database, store, old, rules)
    with database.writing() as session:
        run_control.cancel(session, measuring.id, ada)
    with database.reading() as session:
        assert [each.run_id for each in pruning.plan(session, rules)] == [old]
    assert pruning.prune(database, store, old, rules)


@pytest.mark.parametrize(
    "rules", [Rules(), Rules(checkpoint_days=50), Rules(log_days=50), Rules(50, 50)]
)
def test_younger_checkpoints_stay(database: Database, old: int, rules: Rules) -> None:
    """Without a rule, and for younger checkpoints, no deletion is planned."""
    with database.reading() as session:
        assert list(pruning.plan(session, rules)) == []


def test_active_runs_are_not_pruned(database: Database, old: int) -> None:
    """An active run is pruned by its own policy only."""
    with database.writing() as session:
        runs.get(session, old).status = Status.RUNNING
        assert list(pruning.plan(session, Rules(30, 30))) == []


def test_a_file_that_another_row_names_stays(
    database: Database, old: int, store: LocalStore
) -> None:
    """A file with the same content as another row's stays as long as any row names it."""
    key = f"runs/{old}/checkpoints/10.pt"
    with database.writing() as session:
        session.execute(update(CheckpointFile).where(CheckpointFile.step == 50).values(key=key))
    pruning.prune(database, store, old, Rules(checkpoint_days=30))
    assert obstore.head(store, key)["size"] == 10


def test_no_fork_is_queued_from_what_was_pruned_meanwhile(
    database: Database, old: int, store: LocalStore, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork is refused if its checkpoint is pruned while it is queued."""
    monkeypatch.setattr(runs, "_check_parent", lambda *_: None)
    pruning.prune(database, store, old, Rules(checkpoint_days=30))
    with pytest.raises(Invalid, match="step 10 no longer exists"), database.writing() as session:
        submit(session, ada, config=config(200), parent_id=old, parent_step=10)
