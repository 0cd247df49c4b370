"""Checkpoints in the database and in the store."""

import hashlib
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from db.database import Database
from db.errors import Invalid, NotFound, StaleAttempt
from db.files import checkpoints
from db.files.object_store import get_file, open_store, put_file
from db.queue import queue, run_control
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status, User
from tests.db.conftest import config, submit, submit_command
from tests.db.files.checkpoints_made import in_shards, make_saved, make_saved_weights
from tests.db.telemetry.telemetry_made import make_metric, record
from tests.spool_made import checkpoint_of


def test_published_twice_is_listed_once(database: Database, running: Run) -> None:
    """A checkpoint event that is replayed replaces its row; the newest step is first."""
    with database.writing() as session:
        for event in (make_saved(10), make_saved(20), make_saved(10, "bb")):
            checkpoints.publish(
                session, running.id, 1, checkpoint_of(event), [f"key-{event['step']}"]
            )
        rows = checkpoints.of_run(session, running.id)
    assert [(row.step, row.sha256, row.key) for row in rows] == [
        (20, "aa", "key-20"),
        (10, "bb", "key-10"),
    ]


def test_a_fenced_attempt_publishes_nothing(database: Database, running: Run) -> None:
    """A stale attempt's worker cannot publish a checkpoint."""
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.QUEUED)
    with pytest.raises(StaleAttempt), database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(10)), ["key"])
    with database.reading() as session:
        assert checkpoints.of_run(session, running.id) == []


def test_a_request_is_acknowledged_by_its_checkpoint(
    database: Database, running: Run, ada: User
) -> None:
    """A published checkpoint acknowledges its request, and other requests stay."""
    with database.writing() as session:
        scale = run_control.request_scale(session, running.id, ada, 512.0)
        request = run_control.request_checkpoint(session, running.id, ada)
        checkpoints.publish(
            session, running.id, 1, checkpoint_of(make_saved(10, request=request.id)), ["key"]
        )
        assert queue.renew(session, running.id, 1, 60.0).requests == (scale,)


def test_another_runs_checkpoint_is_not_found(database: Database, running: Run) -> None:
    """A checkpoint is found only by its own run."""
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(10)), ["key"])
    with pytest.raises(NotFound), database.reading() as session:
        checkpoints.get(session, running.id + 1, 1)


def test_retention_keeps_the_last_the_best_and_every_nth(database: Database, running: Run) -> None:
    """Retention keeps the last, the best and every nth periodic checkpoint."""
    policy = {"keep_last": 1, "keep_every_steps": 40, "keep_best": "val/accuracy"}
    points = ((10, 0.5), (20, 0.9), (30, 0.8))
    record(database, running, events=[make_metric(*point) for point in points])
    with database.writing() as session:
        for step in range(10, 70, 10):
            checkpoints.publish(
                session, running.id, 1, checkpoint_of(make_saved(step)), [f"key-{step}"]
            )
        asked_for = make_saved(5) | {"reason": "request"}
        checkpoints.publish(session, running.id, 1, checkpoint_of(asked_for), ["key-5"])
        gone = checkpoints.prune(session, running.id, 1, policy)
        steps = [row.step for row in checkpoints.of_run(session, running.id)]
        assert checkpoints.prune(session, running.id, 1, {}) == []
    assert steps == [60, 40, 20, 5]
    assert sorted(gone) == ["key-10", "key-30", "key-50"]


def test_a_checkpoint_that_another_run_started_from_is_kept(
    database: Database, running: Run, ada: User
) -> None:
    """Retention keeps a checkpoint from which another run started."""
    with database.writing() as session:
        for step in (10, 20, 30):
            checkpoints.publish(
                session, running.id, 1, checkpoint_of(make_saved(step)), [f"key-{step}"]
            )
        fork = submit(session, ada, parent_id=running.id, parent_step=10)
        assert checkpoints.prune(session, running.id, 1, {"keep_last": 1}) == ["key-20"]
        assert [row.key for row in checkpoints.to_resume(session, fork)] == ["key-10"]


@pytest.mark.parametrize(
    ("steps", "kept"), [(["10", "20"], [10, 20]), ([], [20]), (["10"], [10, 20])]
)
def test_checkpoints_that_a_run_waits_to_measure_are_kept(
    database: Database, running: Run, ada: User, steps: list[str], kept: list[int]
) -> None:
    """Checkpoints are kept for a queued measurement until it has ended."""
    lab = {"task": "precision_plan", "checkpoints": steps}
    with database.writing() as session:
        for step in (10, 20, 30, 40):
            checkpoints.publish(
                session, running.id, 1, checkpoint_of(make_saved(step)), [f"key-{step}"]
            )
        options = {"parent_id": running.id, "parent_step": 20}
        measuring = submit(session, ada, config=config() | {"lab": lab}, **options)
        assert checkpoints.find_steps_started_from(session, running.id) == set(kept)
        checkpoints.prune(session, running.id, 1, {"keep_last": 1})
        left = sorted(row.step for row in checkpoints.of_run(session, running.id))
        assert left == [*kept, 40]
        run_control.cancel(session, measuring.id, ada)
        assert checkpoints.find_steps_started_from(session, running.id) == set()
        checkpoints.prune(session, running.id, 1, {"keep_last": 1})
        assert [row.step for row in checkpoints.of_run(session, running.id)] == [40]


def test_shards_come_and_go_with_their_checkpoint(database: Database, running: Run) -> None:
    """A sharded state is found and deleted with all its shards; saved by fewer ranks, it has
    only theirs.
    """
    with database.writing() as session:
        for step in (10, 20):
            event = in_shards(step, ranks=3)
            keys = [f"{step}-{file['kind']}" for file in event["files"]]
            checkpoints.publish(session, running.id, 1, checkpoint_of(event), keys)
        run = runs.get(session, running.id)
        newest, first = states = checkpoints.to_resume(session, run)
        shards = checkpoints.shards_of(session, states)
        kinds = ["shard.0", "shard.1", "shard.2", "shard.metadata"]
        assert sorted(row.key for row in shards[newest.id]) == [f"20-{kind}" for kind in kinds]
        assert sorted(row.key for row in shards[first.id]) == [f"10-{kind}" for kind in kinds]
        assert run.stored_bytes == 2 * (10 + 4 * 100)

        fewer = in_shards(20, ranks=2)
        keys = [f"20-{file['kind']}" for file in fewer["files"]]
        checkpoints.publish(session, running.id, 1, checkpoint_of(fewer), keys)
        assert run.stored_bytes == 2 * 10 + 7 * 100
        gone = checkpoints.prune(session, running.id, 1, {"keep_last": 1})
        assert sorted(gone) == ["10-checkpoint", *(f"10-{kind}" for kind in kinds)]
        assert run.stored_bytes == 10 + 3 * 100


def test_weights_to_start_from_are_those_of_all_modules(database: Database, running: Run) -> None:
    """Initial weights of a run are those of a step, or of the newest stored one, without
    averages.
    """
    with database.writing() as session:
        for step, keys in ((10, "abcde"), (20, "fghij"), (30, [""] * 5)):
            event = make_saved_weights(step, "critic", "generator")
            checkpoints.publish(session, running.id, 1, checkpoint_of(event), list(keys))
        for step, expected in ((10, "bd"), (None, "gi"), (30, ""), (11, "")):
            rows = checkpoints.weights_at(session, running.id, step)
            assert "".join(row.key for row in rows) == expected
        wanted = {"weights": {"path": None, "run": running.id, "step": 10}}
        found = checkpoints.to_start_from(session, wanted)
        assert [row.kind for row in found] == ["weights.critic", "weights.generator"]
        assert checkpoints.to_start_from(session, {"weights": {"path": "a.pt", "run": None}}) == []
        assert checkpoints.to_start_from(session, config()) == []


def test_weights_that_a_run_waits_to_start_from_are_kept(
    database: Database, running: Run, ada: User
) -> None:
    """Weights are kept until the run that starts from them has ended."""
    with database.writing() as session:
        for step in (10, 20, 30):
            checkpoints.publish(
                session, running.id, 1, checkpoint_of(make_saved_weights(step)), list("abc")
            )
        submit_command(session, ada, config={"weights": "large"})
        wanted = {"path": None, "run": running.id, "step": 10, "strict": True}
        waiting = submit(session, ada, config=config() | {"weights": wanted})
        checkpoints.prune(session, running.id, 1, {"keep_last": 1})
        assert {row.step for row in checkpoints.of_run(session, running.id)} == {30, 10}
        run_control.cancel(session, waiting.id, ada)
        checkpoints.prune(session, running.id, 1, {"keep_last": 1})
        assert {row.step for row in checkpoints.of_run(session, running.id)} == {30}


def test_the_last_checkpoint_before_a_spike_is_kept(database: Database, running: Run) -> None:
    """Checkpoints before the latest spikes are kept, during the run and after it."""
    spikes = [{"event": "spike", "step": step, "loss": 9.0, "z": 50.0} for step in (5, 25, 40)]
    record(database, running, events=spikes)
    with database.writing() as session:
        for step in range(10, 80, 10):
            checkpoints.publish(
                session, running.id, 1, checkpoint_of(make_saved(step)), [f"key-{step}"]
            )
            checkpoints.prune(session, running.id, 1, {"keep_last": 1})
        kept = [row.step for row in checkpoints.of_run(session, running.id)]
    assert kept == [70, 30, 20]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent_step": 11}, "no checkpoint at step 11; run 1 has them at 10"),
        ({"recipe": "mlp"}, "mlp cannot start from a checkpoint of digits"),
        (
            {"config": config(steps=10)},
            "training.steps: 10 steps in all are not beyond the checkpoint's step 10",
        ),
    ],
)
def test_a_fork_needs_a_checkpoint_that_fits(
    database: Database, running: Run, ada: User, changes: dict[str, Any], message: str
) -> None:
    """A fork from a missing checkpoint, another recipe's or one too far on is refused by field."""
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(make_saved(10)), ["key-10"])
    values = {"parent_id": running.id, "parent_step": 10} | changes
    with pytest.raises(Invalid, match=message), database.writing() as session:
        submit(session, ada, **values)


def test_file_comes_back_whole_from_a_bucket(tmp_path: Path) -> None:
    """A file put into a store is read back, and verified."""
    store, path = MemoryStore(), tmp_path / "a.pt"
    path.write_bytes(b"weights" * 1000)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    put_file(store, "runs/1/a.pt", path)
    copy = tmp_path / "copy" / "a.pt"
    get_file(store, "runs/1/a.pt", copy, sha256=sha256)
    assert copy.read_bytes() == path.read_bytes()
    with pytest.raises(FileNotFoundError):
        get_file(store, "runs/1/b.pt", tmp_path / "b.pt", sha256=sha256)


def test_altered_file_is_rejected_by_name(tmp_path: Path) -> None:
    """An altered file in the store is an error with its key."""
    path = tmp_path / "a.pt"
    path.write_bytes(b"cut shor")
    with pytest.raises(ValueError, match=r"runs/1/a\.pt is damaged"):
        get_file(MemoryStore(), "runs/1/a.pt", path, sha256="00")


def test_local_store_is_the_data_folder(tmp_path: Path) -> None:
    """The default store is the data folder, where trainings write their checkpoints."""
    settings = Settings(data=tmp_path)
    path = settings.run_folder(1) / "a.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    store = open_store(settings)
    put_file(store, "runs/1/a.pt", path)
    assert obstore.get(store, "runs/1/a.pt").bytes().to_bytes() == b"weights"


def test_wrong_storage_url_names_the_setting(tmp_path: Path) -> None:
    """The error for an invalid storage URL names HALFSTEP_STORAGE_URL."""
    with pytest.raises(Invalid, match="HALFSTEP_STORAGE_URL"):
        open_store(Settings(data=tmp_path, storage_url="nonsense://x"))
