"""Many workers, one queue: each run is held by one live worker, and none is lost."""

import multiprocessing
import random
import signal
import time

from sqlalchemy import Select, func, select

from db.database import Database
from db.queue import claims, queue, workers
from db.runs import runs
from db.tables import Run, RunNode, Status, User
from tests.faults.conftest import COUNTS, often

WORKERS = 8


def test_claims_under_contention_with_workers_killed(
    database: Database, database_url: str, ada: User, moments: random.Random
) -> None:
    """8 workers claim, renew and end runs while some are killed; each run ends once."""
    count = often(full=1000, short=60)
    with database.writing() as session:
        for _ in range(count):
            config = {"precision": "fp32", "training": {"steps": 1}}
            runs.submit(session, ada, Run(recipe="digits", config=config))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(database_url, n)) for n in range(WORKERS)]
    for process in processes:
        process.start()
    killed = 0
    while any(process.is_alive() for process in processes):
        time.sleep(moments.uniform(0.2, 1.0))
        if killed < count // 20:
            victim = moments.randrange(WORKERS)
            processes[victim].kill()
            processes[victim].join()
            processes[victim] = context.Process(target=work, args=(database_url, victim))
            processes[victim].start()
            killed += 1
    with database.reading() as session:
        by_status = dict(
            session.execute(select(Run.status, func.count()).group_by(Run.status)).all()
        )
        attempts = session.scalar(select(func.sum(Run.attempt)))
        # Every attempt was ended once, by its worker or by the lease that its death let run out.
        open_nodes = session.scalar(select(func.count()).where(RunNode.ended_at.is_(None)))
        nodes = session.scalar(select(func.count()).select_from(RunNode))
        overlaps = session.scalar(select(func.count()).select_from(overlapping().subquery()))
    assert by_status == {Status.FINISHED: count}
    assert (open_nodes, nodes, overlaps) == (0, attempts, 0)
    COUNTS.append(
        f"{count} runs claimed {nodes} times by {WORKERS} workers, of which {killed} were killed"
    )


def overlapping() -> Select[tuple[int]]:
    """Select pairs of attempts of one run that overlap in time."""
    earlier, later = RunNode.__table__.alias(), RunNode.__table__.alias()
    began = later.c.lease_expires_at - LEASE_SECONDS
    return select(earlier.c.run_id).where(
        earlier.c.run_id == later.c.run_id,
        earlier.c.attempt < later.c.attempt,
        earlier.c.ended_at > began + 0.001,
    )


LEASE_SECONDS = 1.0


def work(url: str, number: int) -> None:
    """Act as a worker with instant trainings until the queue is empty."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    database = Database(url)
    with database.writing() as session:
        worker = workers.register(
            session, name=f"w{number}", host="host", pid=1, devices=[], recipes=[], versions={}
        )
    lost: set[int] = set()
    while True:
        with database.writing() as session:
            lost = queue.mark_unreachable(session, lost)
            queue.requeue_unreachable(session, lost)
            run = claims.claim(
                session,
                worker.id,
                recipes=["digits"],
                precisions=["fp32"],
                free_devices=[0],
                lease_seconds=LEASE_SECONDS,
            )
            left = session.scalar(
                select(func.count()).where(Run.status.not_in((Status.FINISHED, Status.FAILED)))
            )
        if run is None:
            if not left:
                return
            time.sleep(0.05)
            continue
        time.sleep(0.05)  # a training, long enough to be killed in
        with database.writing() as session:
            queue.end(session, run.id, run.attempt, Status.FINISHED)
