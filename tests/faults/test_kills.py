"""SIGKILL at random moments: every run ends bit-identical to an undisturbed one."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
from sqlalchemy import make_url

from db.access import accounts
from db.queue import pending_reasons
from db.tables import Status
from tests.conftest import postgresql_control
from tests.faults.conftest import COUNTS, often, only_in_full
from tests.faults.kills_made import serving
from tests.faults.sameness import assert_same, config
from tests.faults.viewer import Viewer
from tests.site import Site, answers, free_port, is_running, until, up

STEPS = often(full=1500, short=600)
TRIES = {"HALFSTEP_MAX_ATTEMPTS": "1000", "HALFSTEP_MAX_STALLED_ATTEMPTS": "1000"}


def test_killed_trainings_end_as_if_nothing_had_happened(
    site: Site, moments: random.Random
) -> None:
    """A run whose training is killed ends with the same weights, optimizer, scaler and records."""
    times = often(full=50, short=1)

    def kill_training(run_id: int) -> bool:
        training = site.training(run_id)
        training.kill()
        until(lambda: not is_running(training))
        return True

    with site.worker(**TRIES):
        disturbed = disturb(site, times, moments, kill_training)
        assert_undisturbed(site, disturbed)
    COUNTS.append(f"training killed {times} times, {len(disturbed)} runs bit-identical")


@only_in_full
def test_killed_workers_do_not_disturb_their_runs(site: Site, moments: random.Random) -> None:
    """After a SIGKILL of the worker supervisors and trainings continue, and the next worker
    finds them.
    """
    times = 25
    with ExitStack() as stack:
        workers = [stack.enter_context(site.worker(**TRIES))]

        def kill_worker(_run_id: int) -> bool:
            workers[-1].kill()
            workers[-1].wait()
            workers.append(stack.enter_context(site.worker(**TRIES)))
            return True

        disturbed = disturb(site, times, moments, kill_worker)
        assert_undisturbed(site, disturbed)
    assert {site.run(run_id).attempt for run_id in disturbed} == {1}
    COUNTS.append(f"worker killed {times} times, {len(disturbed)} runs bit-identical")


def test_killed_servers_do_not_disturb_runs_or_viewers(site: Site, moments: random.Random) -> None:
    """After a SIGKILL of the server runs continue, and a returning client has missed nothing."""
    times, port = often(full=25, short=1), free_port()
    with site.database.writing() as session:
        token, _row = accounts.make_api_token(session, site.owner, "viewer")
    viewers: dict[int, Viewer] = {}
    with ExitStack() as stack:
        stack.enter_context(site.worker())
        servers = [stack.enter_context(serving(site, port))]

        def kill_server(run_id: int) -> bool:
            if run_id not in viewers:
                viewers[run_id] = Viewer(
                    f"http://127.0.0.1:{port}/api/v1/runs/{run_id}/live", token
                )
                viewers[run_id].start()
                until(lambda: viewers[run_id].cursor != "")
            if viewers[run_id].is_over:  # its run has ended, so no viewer would come back
                return False
            servers[-1].kill()
            servers[-1].wait()
            servers.append(stack.enter_context(serving(site, port)))
            return True

        disturbed = disturb(site, times, moments, kill_server)
        assert_undisturbed(site, disturbed)
        for viewer in viewers.values():
            viewer.join()
    assert {site.run(run_id).attempt for run_id in disturbed} == {1}
    for run_id, viewer in viewers.items():
        viewer.assert_missed_nothing(site, run_id)
    returns = sum(viewer.returns for viewer in viewers.values())
    assert returns >= times
    COUNTS.append(
        f"server killed {times} times, {len(disturbed)} runs bit-identical, "
        f"{len(viewers)} viewers back {returns} times, nothing missed"
    )


def test_all_killed_at_once_then_up_again(site: Site, moments: random.Random) -> None:
    """After `kill -9` of everything, `up` starts queued runs and resumes running ones, to the
    bit.
    """
    environment = {**site.environment, "HALFSTEP_PORT": str(free_port())}
    first, second = (site.submit(config=config(STEPS)) for _ in range(2))
    waits = site.submit(recipe="absent", priority=1)  # for a worker that never comes
    with httpx2.Client(follow_redirects=True) as browser:
        with up(**environment) as (process, link):
            base = link.split("/?")[0]
            until(lambda: answers(base))
            browser.post(
                base,
                data={"token": link.partition("token=")[2]},
                headers={"origin": base},
            )
            site.wait_for_step(first, moments.randrange(1, STEPS // 5))  # far from its end
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                os.kill(each.pid, signal.SIGKILL)
            process.wait()
            kill_database(site)
        with site.database.reading() as session:
            assert list(pending_reasons.Queue.read(session).places) == [waits, second]
        with up(**environment):
            until(lambda: answers(base))
            assert browser.get(f"{base}/runs").url.path == "/runs"  # signed in as before
            ended = [site.wait(run_id) for run_id in (first, second)]
    assert [run.attempt for run in ended] == [2, 1]
    assert site.run(waits).status == Status.QUEUED
    assert_same(site, first, second)
    COUNTS.append("everything killed at once, then `up`: running and queued run bit-identical")


def disturb(
    site: Site, times: int, moments: random.Random, kill: Callable[[int], bool]
) -> list[int]:
    """Kill something repeatedly, each time while a run trains; return the runs.

    kill: returns whether it has killed anything.
    """
    disturbed: list[int] = []
    killed = 0
    while killed < times:
        run_id = site.submit(config=config(STEPS))
        disturbed.append(run_id)
        while killed < times and is_training(site, run_id):
            time.sleep(moments.uniform(0, 4))
            if site.has_training(run_id):
                killed += kill(run_id)
    return disturbed


def is_training(site: Site, run_id: int) -> bool:
    """Wait until a run trains or has ended; return whether it trains."""
    until(lambda: site.has_training(run_id) or site.run(run_id).ended_at is not None)
    return site.run(run_id).ended_at is None


def assert_undisturbed(site: Site, run_ids: list[int]) -> None:
    """Assert that the runs end like an undisturbed one."""
    undisturbed = site.submit(config=config(STEPS))
    for run_id in (*run_ids, undisturbed):
        assert site.wait(run_id).status == Status.FINISHED
    for run_id in run_ids:
        assert_same(site, run_id, undisturbed)


def kill_database(site: Site) -> None:
    """Crash PostgreSQL and start it again; SQLite crashed with its processes."""
    if folder := make_url(site.url).query.get("host"):
        postgresql_control(Path(str(folder)), "stop", "-m", "immediate")
        postgresql_control(Path(str(folder)), "start")
        until(site.reaches_database)
