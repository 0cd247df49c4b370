"""Preemption with kills, and of runs on several nodes: the bits stay equal."""

import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest

from db.queue import preemption, workers
from db.runs import runs
from db.tables import Status
from tests.faults.sameness import assert_same, config
from tests.site import GATED, Site, is_running, until

pytestmark = pytest.mark.sql


def submit(site: Site, **changes: Any) -> int:
    """Queue a training in which all that a resume could forget has an effect."""
    settings = config(steps=120) | {"checkpoints": {"every_steps": 5}}
    return site.submit(**({"recipe": GATED, "config": settings} | changes))


def preempt(site: Site) -> None:
    preemption.preempt_due(site.database, runs_per_user=0, devices_per_user=0)


def reasons(site: Site, run_id: int) -> list[str | None]:
    with site.database.reading() as session:
        return [row.reason for row in runs.statuses(session, run_id)]


def wait_for_steps(site: Site, *run_ids: int) -> None:
    for run_id in run_ids:
        site.wait_for_step(run_id, 10)


@pytest.mark.parametrize("is_all", [False, True], ids=["worker", "supervisor and training too"])
def test_a_kill_in_between_costs_a_preempted_run_no_bit(site: Site, is_all: bool) -> None:
    """If a run is killed during its preemption, the higher run starts first, and the preempted
    one resumes its last checkpoint.
    """
    low = submit(site, preemptible=True)
    with site.start_gated_worker() as worker:
        wait_for_steps(site, low)
        training, supervisor = site.training(low), site.supervisor_pid(low)
        training.suspend()
        high = site.submit(steps=20, priority=1)
        preempt(site)
        assert site.run(low).status == Status.PAUSING
        worker.kill()
        worker.wait()
        if is_all:
            os.kill(supervisor, signal.SIGKILL)
            training.kill()
            until(lambda: not is_running(training))
        else:
            training.resume()
    with site.start_gated_worker():
        assert site.wait(high).status == Status.FINISHED
        site.open_gate()
        run = site.wait(low)
        undisturbed = submit(site)
        site.wait(undisturbed)
    reason = "its supervisor died in attempt 1" if is_all else f"preempted by run {high}"
    assert reason in reasons(site, low)
    assert (run.attempt, (run.resumed_step or 0) >= 5) == (2, True)
    assert site.run(high).started_at < run.ended_at
    assert_same(site, low, undisturbed)


def test_gangs_preempt_and_are_preempted_with_equal_bits(site: Site) -> None:
    """A run of two nodes is preempted on both by one run, then preempts two others; all end with
    equal bits.
    """
    with ExitStack() as stack:
        for name in ("w1", "w2"):
            stack.enter_context(site.start_gated_worker(name))
        until(lambda: count_workers(site) == 2)
        gang = submit(site, nodes=2, preemptible=True)
        wait_for_steps(site, gang)
        singles = [submit(site, preemptible=True, priority=1)]
        preempt(site)
        wait_for_steps(site, *singles)
        assert site.run(gang).status == Status.QUEUED
        singles.append(submit(site, preemptible=True, priority=1))
        wait_for_steps(site, *singles)
        higher = submit(site, nodes=2, priority=2)
        preempt(site)
        wait_for_steps(site, higher)
        assert [site.run(run_id).status for run_id in singles] == [Status.QUEUED] * 2
        site.open_gate()
        for run_id in (higher, *singles, gang):
            site.wait(run_id)
        undisturbed = submit(site)
        site.wait(undisturbed)
    assert [site.run(run_id).attempt for run_id in (higher, *singles, gang)] == [1, 2, 2, 2]
    for run_id in singles:
        assert f"preempted by run {higher}" in reasons(site, run_id)
        assert_same(site, run_id, undisturbed)
    assert f"preempted by run {singles[0]}" in reasons(site, gang)
    assert_same(site, gang, higher)


def count_workers(site: Site) -> int:
    with site.database.reading() as session:
        return len(workers.alive(session))
