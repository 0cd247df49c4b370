"""Worker, supervisor and training as real processes, with real databases."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from sqlalchemy import func, literal_column, select, update

from app.runs.summary import summarise
from db.files import checkpoints
from db.queue import queue, run_control, workers
from db.runs import environments, runs
from db.tables import ControlRequest, Run, ScalerEvent, Status
from tests import warm
from tests.site import GATED, Site, halfstep, is_running, until
from tests.spool_made import spool_raw

pytestmark = pytest.mark.sql

#: A supervisor that has ended.


def test_two_workers_record_every_attempted_step(site: Site) -> None:
    """Two runs on two workers at once have as many rows as steps, with skips and checkpoints."""
    ids = [site.submit(steps=120), site.submit(steps=120)]
    with ExitStack() as stack:
        for name in ("w1", "w2"):
            stack.enter_context(site.worker(name))
        ended = [site.wait(run_id) for run_id in ids]
    assert [run.status for run in ended] == ["finished", "finished"]
    assert len({run.worker_id for run in ended}) == 2
    for run in ended:
        assert site.count_steps(run.id) == run.step == 120
        with site.database.reading() as session:
            skips = select(func.count()).where(
                ScalerEvent.run_id == run.id, ScalerEvent.kind == "skip"
            )
            assert session.scalars(skips).one() == run.skipped > 0
            kinds = [file.kind for file in checkpoints.of_run(session, run.id)]
        assert kinds == ["checkpoint", "weights"]
        assert not list((site.scratch(run.id) / "spool").iterdir())


def test_a_run_that_raises_fails_with_its_message_and_the_worker_continues(
    site: Site, tmp_path: Path
) -> None:
    """An invalid setting is recorded as its run's failure of kind settings, and the next run
    trains.

    So it does after a run stopped by a rule of its configuration, which has its own failure kind,
    and after one whose metric is no number, which names the metric and its value.
    """
    recipe = tmp_path / "phased.py"
    recipe.write_text(
        "from trainer.recipes.digits import Digits\n\n\n"
        "class Phased(Digits):\n"
        "    name = 'phased'\n\n"
        "    def evaluate(self):\n"
        "        return {'val/loss': 0.5, 'phase': 'warm-up'}\n"
    )
    name = f"{recipe}:Phased"
    training = {"steps": 10, "batch_size": 5000}
    broken = site.submit(config={"precision": "fp16", "training": training})
    scaler = {"init_scale": 2.0**100, "floor": 2.0**100, "stop_at_floor": True}
    stopped = site.submit(config={"precision": "fp16", "training": {"steps": 10}, "scaler": scaler})
    phased, fine = site.submit(recipe=name, steps=10), site.submit(steps=10)
    with site.worker(HALFSTEP_RECIPES=name):
        assert site.wait(fine).status == Status.FINISHED
    failed = site.run(broken)
    assert failed.status == Status.FAILED
    assert (failed.error or "").startswith("training.batch_size is 5000")
    with site.database.reading() as session:
        last = runs.statuses(session, broken)[-1]
    assert (last.failure_kind, last.reason) == ("settings", failed.error)
    assert "training.batch_size is 5000" in site.log(broken)
    with site.database.reading() as session:
        noted = environments.newest(session, fine)
        assert noted is not None
        assert noted.content["file"]["path"].endswith("trainer/recipes/digits.py")
        assert "class Digits" in (environments.texts(noted).source or "")
        assert noted.content["versions"]["torch"] == torch.__version__
        digest = workers.recipe(session, "digits")["sha256"]
        assert digest == noted.content["file"]["sha256"]
    by_rule = site.run(stopped)
    assert (by_rule.status, by_rule.failure_kind) == (Status.FAILED, "rule")
    assert (by_rule.error or "").startswith("step 1 was skipped although the loss scale")
    failed = site.run(phased)
    assert (failed.status, failed.attempt) == (Status.FAILED, 1)
    message = "metric 'phase' at step 10: value is 'warm-up'; allowed: a number"
    assert message in (failed.error or "")
    with site.database.reading() as session:
        last = runs.statuses(session, phased)[-1]
    assert (last.failure_kind, message in (last.reason or "")) == ("code", True)
    assert site.count_steps(phased) == 10


def test_a_recipe_that_writes_an_invalid_spool_fails_with_the_reason(
    site: Site, tmp_path: Path
) -> None:
    """A recipe that writes invalid frames fails with the reason; the frames are quarantined."""
    recipe = tmp_path / "spooling.py"
    recipe.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from halfstep.telemetry.spool import FILE_HEADER, MAGIC, VERSION, frame\n"
        "from trainer.recipes.digits import Digits\n\n\n"
        "class Spooling(Digits):\n"
        "    name = 'spooling'\n\n"
        "    def evaluate(self):\n"
        '        written = FILE_HEADER.pack(MAGIC, VERSION) + frame(2, b\'{"event": "jump"}\')\n'
        "        Path(sys.argv[1], 'spool', '1-9.spool').write_bytes(written)\n"
        "        time.sleep(600)\n"
    )
    name = f"{recipe}:Spooling"
    run_id = site.submit(recipe=name, steps=10)
    with site.worker(HALFSTEP_RECIPES=name):
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FAILED, 1)
    assert "event is 'jump'; allowed: scaler, metric" in (run.error or "")
    assert "event is 'jump'" in site.log(run_id)
    with site.database.reading() as session:
        assert runs.statuses(session, run_id)[-1].failure_kind == "code"
    kept = site.data / "runs" / str(run_id) / "quarantine-1" / "frames"
    assert b'{"event": "jump"}' in kept.read_bytes()
    assert site.count_steps(run_id) == 10


@pytest.mark.parametrize("reported", [b'{"event": "metric", "value": "warm-up"}', b"no header"])
def test_the_training_of_a_dead_supervisor_affects_only_its_run(
    site: Site, reported: bytes
) -> None:
    """After its supervisor died, invalid output fails its own run, and other runs are queued."""
    worker = site.idle_worker()
    bad, good = site.submit(), site.submit()
    for run_id in (bad, good):
        site.lost_attempt(worker, run_id)
    path = spool_raw(site.scratch(bad) / "spool", 1, reported)
    if reported == b"no header":
        path.write_bytes(reported * 10)
    worker._reap()
    assert worker.running.nodes == {}
    assert (site.run(bad).status, site.run(good).status) == (Status.FAILED, Status.QUEUED)
    with site.database.reading() as session:
        last = runs.statuses(session, bad)[-1]
    quarantine = site.data / "runs" / str(bad) / "quarantine-1"
    assert last.failure_kind == "code"
    assert str(quarantine) in (last.reason or "")
    assert list(quarantine.iterdir())


def test_nothing_that_one_run_left_keeps_the_others_from_being_looked_at(site: Site) -> None:
    """A dead run with unreadable files fails, and the next one is still closed."""
    worker = site.idle_worker()
    bad, good = site.submit(), site.submit()
    for run_id in (bad, good):
        site.lost_attempt(worker, run_id)
    site.scratch(bad).mkdir(parents=True)
    (site.data / "runs" / str(bad) / "supervisor-1.log").mkdir(parents=True)  # no file to read
    worker._reap()
    assert (site.run(bad).status, site.run(good).status) == (Status.FAILED, Status.QUEUED)


#: Settings that no submission may have, but a row of an earlier version may.
TOO_MUCH, TOO_LONG = '"device_memory_gib": 1e308', f'"seed": {"1" * 5000}'
#: Larger than any double: PostgreSQL refuses to read it as one, SQLite reads infinity.
UNREADABLE = f'"device_memory_gib": {10**400}'


@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize(
    ("wish", "status"),
    [(TOO_MUCH, Status.QUEUED), (UNREADABLE, Status.FAILED), (TOO_LONG, Status.FAILED)],
    ids=["1e308 GiB", "401 digits", "5,000 digits"],
)
def test_a_run_that_cannot_be_claimed_does_not_keep_the_next_from_its_turn(
    site: Site, wish: str, status: Status
) -> None:
    """A run whose claim fails, or that needs more than any worker has, does not block the next."""
    _check_what_stands_before_a_run(site, wish, status)


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize(
    ("wish", "status"),
    [(TOO_MUCH, Status.QUEUED), (UNREADABLE, Status.QUEUED), (TOO_LONG, Status.FAILED)],
    ids=["1e308 GiB", "401 digits", "5,000 digits"],
)
def test_nor_does_it_on_sqlite(site: Site, wish: str, status: Status) -> None:
    """On SQLite a run whose claim fails, or cannot fit, does not block the next one either."""
    _check_what_stands_before_a_run(site, wish, status)


def _check_what_stands_before_a_run(site: Site, wish: str, expected: Status) -> None:
    worker = site.idle_worker()
    bad, good = site.submit(priority=1), site.submit()
    with site.database.writing() as session:
        text = f'{{"precision": "fp16", "training": {{"steps": 60, {wish}}}}}'
        written = update(Run).where(Run.id == bad).values(config=literal_column(f"'{text}'"))
        session.execute(written.execution_options(synchronize_session=False))
    node = worker._next({0})
    assert node is not None
    assert (node.run_id, node.attempt, node.devices) == (good, 1, [0])
    with site.database.reading() as session:
        query = select(Run.status, Run.error).where(Run.id == bad)
        status, error = session.execute(query).one()
        last = runs.statuses(session, bad)[-1]
    assert status == expected
    if status == Status.FAILED:
        assert error == last.reason
        assert last.failure_kind == "settings"
        assert "it cannot be claimed" in error
    else:
        assert error is None
        with site.database.reading() as session:
            shown = summarise(session, *runs.get_with_owner(session, bad), worker.settings)
        assert (shown.waiting or "").startswith("it needs devices of ∞, and no worker")


def test_cancel_is_executed_at_a_step_boundary_with_a_checkpoint(site: Site) -> None:
    """A cancelled run stops at a step boundary with a checkpoint, which loads."""
    run_id = site.submit(steps=10**6)
    with site.worker():
        site.wait_for_step(run_id, 20)
        with site.database.writing() as session:
            run_control.cancel(session, run_id, site.owner)
        run = site.wait(run_id)
    assert run.status == Status.CANCELLED
    assert run.step == site.count_steps(run_id) < 10**6
    with site.database.reading() as session:
        state = checkpoints.to_resume(session, run)[0]
    assert (state.step, state.reason) == (run.step, "cancel")
    assert torch.load(site.data / state.key, weights_only=True)["progress"]["step"] == run.step


def test_requests_are_executed_while_a_run_trains_on(site: Site) -> None:
    """Requests are executed during the training; the same scale or step counts again."""
    run_id = site.submit(steps=10**6)
    with site.worker():
        site.wait_for_step(run_id, 1)
        with site.database.writing() as session:
            run_control.request_checkpoint(session, run_id, site.owner)
            for _ in range(2):
                run_control.request_scale(session, run_id, site.owner, 1024.0)
                run_control.request_replay(session, run_id, site.owner, 1)

        def pending() -> list[ControlRequest]:
            with site.database.reading() as session:
                query = select(ControlRequest).where(ControlRequest.acknowledged_at.is_(None))
                return list(session.scalars(query))

        until(lambda: not pending())
        run = site.run(run_id)
        assert run.status == Status.RUNNING
        with site.database.writing() as session:
            saved = [file.reason for file in checkpoints.to_resume(session, run)]
            run_control.cancel(session, run_id, site.owner)
        assert saved == ["request"]
        site.wait(run_id)


def test_a_stopped_worker_gives_its_run_back_and_the_next_resumes_it(site: Site) -> None:
    """A worker's SIGTERM leaves a checkpoint and queues the run, which a new worker resumes."""
    run_id = site.submit(steps=200, recipe=GATED)
    with site.start_gated_worker():
        site.wait_for_step(run_id, 10)
    stopped = site.run(run_id)
    assert stopped.status == Status.QUEUED
    with site.start_gated_worker("w2"):
        site.open_gate()
        run = site.wait(run_id)
    assert (run.status, run.attempt, run.resumed_step) == (Status.FINISHED, 2, stopped.step)
    assert site.count_steps(run_id) == 200
    assert f"resumed at step {stopped.step}, exactly" in site.log(run_id)


def test_a_killed_training_is_started_again(site: Site) -> None:
    """A killed training's spool is recorded, and attempt 2 completes the run."""
    config = {
        "precision": "fp16",
        "training": {"steps": 200},
        "checkpoints": {"every_steps": 10},
    }
    run_id = site.submit(config=config, recipe=GATED)
    with site.start_gated_worker():
        site.wait_for_step(run_id, 15)
        site.training(run_id).kill()
        site.open_gate()
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 2)
    assert run.resumed_step
    assert site.count_steps(run_id) == 200
    with site.database.reading() as session:
        requeued = [row for row in runs.statuses(session, run_id) if row.status == "queued"][1]
    assert (requeued.failure_kind, requeued.reason) == (
        "infrastructure",
        "the training process was killed by SIGKILL",
    )


def test_a_killed_supervisor_takes_its_training_with_it(site: Site) -> None:
    """If a resumed run's supervisor is killed, its training ends at once and another starts.

    Every step is recorded in the end, also those from before the pause.
    """
    run_id = site.submit(steps=200, recipe=GATED)
    with site.start_gated_worker():
        site.wait_for_step(run_id, 10)
        with site.database.writing() as session:
            run_control.pause(session, run_id, site.owner)
        paused = site.wait(run_id, Status.PAUSED)
        with site.database.writing() as session:
            run_control.resume(session, run_id, site.owner)
        site.wait_for_step(run_id, paused.step + 10)
        training, supervisor = site.training(run_id), site.supervisor_pid(run_id, attempt=2)
        assert training.ppid() != supervisor  # a warm process forked it
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: not is_running(training))
        site.open_gate()
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 3)
    assert run.resumed_step == paused.step
    assert site.count_steps(run_id) == 200


def test_an_attempt_that_was_given_up_writes_nothing(site: Site) -> None:
    """When another attempt takes over, the stale training is ended and its steps are dropped."""
    run_id = site.submit(steps=10**6)
    with site.worker():
        site.wait_for_step(run_id, 20)
        training = site.training(run_id)
        with site.database.writing() as session:
            queue.end(session, run_id, 1, Status.CANCELLED, reason="taken over by the test")
        recorded = site.count_steps(run_id)
        until(lambda: not is_running(training))
    assert site.count_steps(run_id) == recorded
    assert site.run(run_id).status == Status.CANCELLED


def test_a_worker_without_devices_says_so(site: Site) -> None:
    """A worker without a GPU and with HALFSTEP_CPU_DEVICES=0 ends with a clear message."""
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    ended = warm.run(
        [sys.executable, "-m", "worker.worker"],
        env={**os.environ, **environment, "HALFSTEP_CPU_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("worker: This machine has no GPU and HALFSTEP_CPU_DEVICES is 0")


def test_a_second_worker_of_the_same_name_is_rejected(site: Site) -> None:
    """A second worker with the same name ends, since it would adopt the first one's runs."""
    with site.worker():
        until(lambda: (site.data / "worker-w1.lock").exists())
        environment = {
            "HALFSTEP_DATA": str(site.data),
            "HALFSTEP_DATABASE_URL": site.url,
            "HALFSTEP_WORKER_NAME": "w1",
        }
        command = [sys.executable, "-m", "worker.worker"]
        ended = warm.run(command, env={**os.environ, **environment})
    assert ended.returncode == 1
    assert "a worker named 'w1' is already running here" in ended.stderr


@pytest.mark.only_on("sqlite")
def test_a_worker_reports_whether_its_loop_runs(site: Site) -> None:
    """`--check` succeeds while the worker's loop runs, even without the database, else fails."""

    def is_well() -> bool:
        there = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": "postgresql://nowhere/x"}
        return halfstep("worker", "--check", HALFSTEP_WORKER_NAME="w1", **there).returncode == 0

    lock = site.data / "worker-w1.lock"
    assert not is_well()
    with site.worker() as worker:
        until(lambda: site.offers("digits"))
        os.utime(lock, (0, 0))
        until(is_well)
        worker.send_signal(signal.SIGSTOP)
        os.utime(lock, (0, 0))
        assert not is_well()
        worker.send_signal(signal.SIGCONT)


def test_a_training_that_is_stuck_is_waited_for_no_longer_than_wanted(
    site: Site, tmp_path: Path
) -> None:
    """A stopping worker waits for a stuck training for the grace period only."""
    recipe = tmp_path / "stuck.py"
    recipe.write_text(
        "import time\n"
        "from trainer.recipes.digits import Digits\n\n\n"
        "class Stuck(Digits):\n"
        "    name = 'stuck'\n\n"
        "    def training_step(self, batch):\n"
        "        print('stuck now', flush=True)\n"
        "        time.sleep(600)\n"
    )
    environment = {"HALFSTEP_RECIPES": f"{recipe}:Stuck", "HALFSTEP_STOP_GRACE_SECONDS": "0.5"}
    run_id = site.submit(recipe=f"{recipe}:Stuck")
    with site.worker(**environment):
        until(lambda: "stuck now" in site.log(run_id))
    assert site.run(run_id).status == Status.QUEUED
    with site.worker(**environment):
        until(lambda: site.log(run_id).count("stuck now") == 2)
        for act in (run_control.cancel, run_control.kill):
            with site.database.writing() as session:
                act(session, run_id, site.owner)
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.CANCELLED, 2)
