"""SIGKILL at random moments: every run ends bit-identical to one that nobody disturbed."""

import os
import random
import signal
import time
from typing import Any

import psutil
import torch
from sqlalchemy import select

from db import checkpoints, runs
from db.tables import ACTIVE, Status, Step
from tests.faults.conftest import COUNTS, often
from tests.site import Site, until

CONFIG: dict[str, Any] = {
    "precision": "fp16",
    "training": {"steps": 1500, "schedule": "cosine"},
    "checkpoints": {"every_steps": 100},
    "recipe": {"dropout": 0.1, "shift_pixels": 1},
}
TRIES = {"HALFSTEP_MAX_ATTEMPTS": "1000", "HALFSTEP_MAX_STALLED_ATTEMPTS": "1000"}


def test_killed_trainings_end_as_if_nothing_had_happened(
    site: Site, moments: random.Random
) -> None:
    """SIGKILL of the training process: weights, optimizer, scaler and every record are the same."""
    times = often(full=50, short=2)
    disturbed = [site.submit(config=CONFIG) for _ in range(max(1, times // 10))]
    undisturbed = site.submit(config=CONFIG)
    killed = 0
    with site.worker(**TRIES):
        for run_id in disturbed:
            for _ in range(min(10, times)):
                killed += kill_training(site, run_id, moments)
            site.wait(run_id)
        site.wait(undisturbed)
    for run_id in disturbed:
        assert_same(site, run_id, undisturbed)
    assert killed >= times // 2
    COUNTS.append(f"training killed {killed} times, {len(disturbed)} runs bit-identical")


def test_killed_workers_do_not_disturb_their_runs(site: Site, moments: random.Random) -> None:
    """SIGKILL of the worker: supervisors and trainings go on, and the next worker finds them."""
    times = often(full=25, short=2)
    disturbed, undisturbed = site.submit(config=CONFIG), site.submit(config=CONFIG)
    for _ in range(times):
        with site.worker(**TRIES) as worker:
            time.sleep(moments.uniform(1, 6))
            worker.kill()
            worker.wait()
    with site.worker(**TRIES):
        for run_id in (disturbed, undisturbed):
            assert site.wait(run_id).status == Status.FINISHED
    assert_same(site, disturbed, undisturbed)
    COUNTS.append(f"worker killed {times} times, both runs bit-identical")


def test_all_killed_at_once_then_started_again(site: Site, moments: random.Random) -> None:
    """`kill -9` of everything: queued runs start, running ones resume, and end the same."""
    first, second = site.submit(config=CONFIG), site.submit(config=CONFIG)
    with site.worker(**TRIES) as worker:
        site.wait_for_step(first, moments.randrange(150, 900))
        family = [psutil.Process(worker.pid), psutil.Process(site.supervisor_pid(first))]
        for process in [*family, *family[1].children(recursive=True)]:
            kill(process.pid)
        worker.wait()
    with site.worker(**TRIES):
        for run_id in (first, second):
            assert site.wait(run_id).status == Status.FINISHED
    assert site.run(first).attempt == 2
    assert_same(site, first, second)
    COUNTS.append("everything killed at once, both runs bit-identical")


def kill_training(site: Site, run_id: int, moments: random.Random) -> bool:
    """Kill the training of a run at a random moment of its life; False if it had ended."""

    def began() -> bool:
        return site.run(run_id).status in ACTIVE and site.has_training(run_id)

    until(lambda: began() or site.run(run_id).ended_at is not None)
    time.sleep(moments.uniform(0, 4))
    if not began():
        return False
    training = site.training(run_id)
    kill(training.pid)
    until(lambda: not training.is_running() or training.status() == psutil.STATUS_ZOMBIE)
    return True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def assert_same(site: Site, run_id: int, other_id: int) -> None:
    """Two runs have the same records and ended in the same state, to the bit."""
    assert site.run(run_id).status == site.run(other_id).status == Status.FINISHED
    assert records(site, run_id) == records(site, other_id)
    state, other = final_state(site, run_id), final_state(site, other_id)
    for part in ("modules", "optimizers", "scaler", "random", "progress"):
        assert_equal(state[part], other[part])


def records(site: Site, run_id: int) -> list[tuple[Any, ...]]:
    """All that was recorded of each step but its times, which differ."""
    columns = (
        Step.step,
        Step.loss,
        Step.scale,
        Step.grad_norm,
        Step.grad_norm_clipped,
        Step.lr,
        Step.flags,
    )
    with site.database.reading() as session:
        query = select(*columns).where(Step.run_id == run_id).order_by(Step.step)
        return [tuple(row) for row in session.execute(query)]


def final_state(site: Site, run_id: int) -> dict[str, Any]:
    with site.database.reading() as session:
        newest = checkpoints.to_resume(session, runs.get(session, run_id))[0]
    state: dict[str, Any] = torch.load(site.data / newest.key, weights_only=True)
    return state


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested containers of tensors bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other
