"""A queue of runs of all sizes: the real claim on PostgreSQL, with a simulated clock.

    python -m benchmarks.gangs [--runs 300] [--workers 32] [--patience 300] [--known]

The product's default is compared with two orders in plain Python on the same trace, which know each
run's length: FIFO, in which no run overtakes, and EASY, in which the first that waits has a
reservation and shorter runs are filled in. Long: --runs 5000 --workers 200 --known.
"""

import argparse
import heapq
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select, text, update

from benchmarks import databases
from benchmarks.report import report
from db.access import accounts
from db.database import Database
from db.queue import claims as queue_claims
from db.queue import queue, workers
from db.runs import runs
from db.tables import Run, RunNode, Status, Worker
from halfstep.telemetry.plain_json import JsonObject

DEVICES = 8
BAR_MS = 10.0
#: Nodes, devices of each node, and relative frequency.
SIZES = (
    (1, 1, 40),
    (1, 2, 15),
    (1, 4, 12),
    (1, 8, 12),
    (2, 8, 9),
    (4, 8, 6),
    (8, 8, 4),
    (16, 8, 2),
)
MINUTE, HOUR = 60.0, 3600.0
#: Share of all devices that the arriving runs need.
LOAD = 1.3
#: Workers that claim at an event, besides those whose devices it freed.
ASKING = 8


@dataclass(frozen=True)
class Job:
    """A run of the trace, with its arrival in seconds from the start and its duration."""

    number: int
    comes: float
    nodes: int
    devices: int
    seconds: float

    @property
    def area(self) -> float:
        """Return the device-seconds."""
        return self.nodes * self.devices * self.seconds


@dataclass
class Outcome:
    """The start of each run by its number, and the duration of each claim in milliseconds."""

    starts: dict[int, float] = field(default_factory=dict)
    claims: list[float] = field(default_factory=list)

    def row(self, name: str, trace: list[Job], devices: int) -> tuple[Any, ...]:
        """Return the utilization until the last arrival, and the waits in minutes, as a row."""
        last = max(job.comes for job in trace)
        used = sum(
            max(min(self.starts[job.number] + job.seconds, last) - self.starts[job.number], 0.0)
            * job.nodes
            * job.devices
            for job in trace
            if self.starts[job.number] < last
        )
        end = max(self.starts[job.number] + job.seconds for job in trace)
        small = [self.starts[job.number] - job.comes for job in trace if job.nodes == 1]
        large = [self.starts[job.number] - job.comes for job in trace if job.nodes > 1]
        waits = [
            f"{value / MINUTE:,.0f}"
            for found in (small, large)
            for value in (statistics.median(found), max(found))
        ]
        return (name, f"{100 * used / (devices * last):.1f} %", f"{end / HOUR:.1f} h", *waits)


def made(count: int, worker_count: int) -> list[Job]:
    """Return a trace of log-normal lengths, with arrivals slightly above the workers' capacity."""
    chance = random.Random(0)
    shapes = [(n, d) for n, d, _weight in SIZES if n <= worker_count // 2]
    weights = [weight for n, _d, weight in SIZES if n <= worker_count // 2]
    drawn = chance.choices(shapes, weights, k=count)
    lengths = [min(max(chance.lognormvariate(7.5, 1.2), MINUTE), 24 * HOUR) for _ in drawn]
    area = sum(n * d * seconds for (n, d), seconds in zip(drawn, lengths, strict=True))
    span = area / (DEVICES * worker_count * LOAD)
    times = sorted(chance.uniform(0, span) for _ in drawn)
    return [
        Job(number, comes, n, d, seconds)
        for number, (comes, (n, d), seconds) in enumerate(zip(times, drawn, lengths, strict=True))
    ]


class Cluster:
    """Workers in plain Python, for the two orders that the product is compared with."""

    def __init__(self, count: int) -> None:
        self.free = [DEVICES] * count
        self.ends: list[tuple[float, int, list[int], int]] = []

    def fits(self, job: Job) -> list[int] | None:
        """Return the workers with the least sufficient room."""
        roomy = sorted((free, w) for w, free in enumerate(self.free) if free >= job.devices)
        return [w for _free, w in roomy[: job.nodes]] if len(roomy) >= job.nodes else None

    def start(self, job: Job, where: list[int], moment: float) -> None:
        """Take the run's devices."""
        for worker in where:
            self.free[worker] -= job.devices
        heapq.heappush(self.ends, (moment + job.seconds, job.number, where, job.devices))

    def end_next(self) -> float:
        """Free the devices of the run that ends next; return the time."""
        moment, _number, where, devices = heapq.heappop(self.ends)
        for worker in where:
            self.free[worker] += devices
        return moment

    def ready(self, job: Job) -> tuple[float, list[int]]:
        """Return when and where a run can start at the earliest, if nothing else starts."""
        free = list(self.free)
        roomy = {w for w, each in enumerate(free) if each >= job.devices}
        for moment, _number, where, devices in sorted(self.ends):
            for worker in where:
                free[worker] += devices
                if free[worker] >= job.devices:
                    roomy.add(worker)
            if len(roomy) >= job.nodes:
                return moment, sorted(roomy)[: job.nodes]
        raise AssertionError(job)


def plain(trace: list[Job], worker_count: int, *, fills_in: bool) -> Outcome:
    """Run the trace in order, by EASY if `fills_in` is set, and otherwise by FIFO."""
    waiting: list[Job] = []
    cluster, outcome = Cluster(worker_count), Outcome()
    coming = iter(trace)
    following = next(coming, None)
    while following or waiting:
        next_end = cluster.ends[0][0] if cluster.ends else math.inf
        if following and following.comes <= next_end:
            moment = following.comes
            waiting.append(following)
            following = next(coming, None)
        else:
            moment = cluster.end_next()
        while waiting and (where := cluster.fits(waiting[0])) is not None:
            job = waiting.pop(0)
            cluster.start(job, where, moment)
            outcome.starts[job.number] = moment
        if fills_in and waiting:
            _fill_in(cluster, waiting, outcome, moment)
    return outcome


def _fill_in(cluster: Cluster, waiting: list[Job], outcome: Outcome, moment: float) -> None:
    """Start runs that end before the first queued run can start, or do not use its workers."""
    first = waiting[0]
    until, kept = cluster.ready(first)
    too_large: set[tuple[int, int]] = set()
    for job in waiting[1:]:
        if (job.nodes, job.devices) in too_large:
            continue
        where = cluster.fits(job)
        if where is None:
            too_large.add((job.nodes, job.devices))
            continue
        if moment + job.seconds > until and set(where) & set(kept):
            others = [w for w, free in enumerate(cluster.free) if free >= job.devices]
            where = [w for w in others if w not in kept][: job.nodes]
            if len(where) < job.nodes:
                continue
        cluster.start(job, where, moment)
        outcome.starts[job.number] = moment
        waiting.remove(job)


@contextmanager
def clock(database: Database) -> Iterator[Any]:
    """Stop the database's clock; yield a function that sets it."""
    with database.engine.begin() as connection:
        for line in (
            "CREATE SCHEMA sim",
            # Of one expression, so that PostgreSQL puts it in the place of each call.
            "CREATE FUNCTION sim.clock_timestamp() RETURNS timestamptz STABLE LANGUAGE sql AS "
            "$$SELECT to_timestamp(current_setting('sim.moment')::double precision)$$",
            # Before what PostgreSQL has of that name itself.
            "ALTER ROLE halfstep SET search_path = sim, public, pg_catalog",
            "ALTER ROLE halfstep SET sim.moment = '0'",
        ):
            connection.execute(text(line))
    database.engine.dispose()

    def put(moment: float) -> None:
        with database.engine.begin() as connection:  # there is one, which everything goes over
            setting = "SELECT set_config('sim.moment', :moment, false)"
            connection.execute(text(setting), {"moment": str(moment)})

    yield put


class Site:
    """The product's database, workers and claims."""

    def __init__(
        self, database: Database, worker_count: int, patience: float, *, knows: bool
    ) -> None:
        self.database, self.patience, self.knows = database, patience, knows
        devices: list[JsonObject] = [
            {"kind": "cpu", "index": index, "memory_bytes": 2.0**36, "fp16": True}
            for index in range(DEVICES)
        ]
        recipes: list[JsonObject] = [{"name": "synthetic", "schema": {"type": "object"}}]
        versions = {"torch": "2.13.0"}
        with database.writing() as session:
            self.owner = accounts.user_named(session, "bench")
            for number in range(worker_count):
                name = f"w{number}"
                workers.register(
                    session,
                    name=name,
                    host=name,
                    pid=1,
                    devices=devices,
                    recipes=recipes,
                    versions=versions,
                )
            session.execute(update(Worker).values(seen_at=1e12))
        self.free = dict.fromkeys(range(1, worker_count + 1), DEVICES)
        self.where: dict[int, list[int]] = {}
        self.jobs: dict[int, Job] = {}

    def submit(self, job: Job) -> None:
        """Queue a run with its estimated duration."""
        training = {"steps": 1000, "batch_size": 32}
        with self.database.writing() as session:
            queued = Run(
                recipe="synthetic",
                config={"precision": "fp16", "training": training},
                nodes=job.nodes,
                devices_per_node=job.devices,
                expected_seconds=job.seconds if self.knows else None,
            )
            run = runs.submit(session, self.owner, queued)
        self.jobs[run.id] = job

    def end(self, run_id: int) -> list[int]:
        """Finish a run and free its devices; return its workers."""
        with self.database.writing() as session:
            attempt = runs.get(session, run_id).attempt
            queue.end(session, run_id, attempt, Status.FINISHED)
        where = self.where.pop(run_id)
        for worker in where:
            self.free[worker] += self.jobs[run_id].devices
        return where

    def ask(self, worker_id: int, outcome: Outcome) -> int | None:
        """Let a worker claim; return its run."""
        started = time.perf_counter()
        with self.database.writing() as session:
            run = queue_claims.claim(
                session,
                worker_id,
                recipes=["synthetic"],
                precisions=["fp32", "fp16"],
                free_devices=range(DEVICES),
                device_memory_bytes=2.0**36,
                lease_seconds=1e9,
                reserve_after_seconds=self.patience,
            )
        outcome.claims.append((time.perf_counter() - started) * 1000)
        if run is None:
            return None
        with self.database.writing() as session:
            held = queue.lock_active_attempt(session, run.id, run.attempt)
            queue.seconds_since_start(session, held)
            queue.start(session, run.id, run.attempt)
            mine = select(RunNode.worker_id).where(RunNode.run_id == run.id)
            self.where[run.id] = [worker for worker in session.scalars(mine) if worker is not None]
        for worker in self.where[run.id]:
            self.free[worker] -= self.jobs[run.id].devices
        return run.id


def product(
    database: Database, trace: list[Job], worker_count: int, patience: float, *, knows: bool
) -> Outcome:
    """Run the trace with the real claim: at each event, workers with free devices claim.

    knows: whether each run has an estimated duration.
    """
    outcome, chance = Outcome(), random.Random(1)
    with clock(database) as put:
        site = Site(database, worker_count, patience, knows=knows)
        ends: list[tuple[float, int]] = []
        coming = iter(trace)
        following = next(coming, None)
        while following or ends:
            if following and (not ends or following.comes <= ends[0][0]):
                moment, asking = following.comes, []
                put(moment)
                site.submit(following)
                following = next(coming, None)
            else:
                moment, run_id = heapq.heappop(ends)
                put(moment)
                asking = site.end(run_id)
            idle = [worker for worker, free in site.free.items() if free]
            # All claim twice a second; of the many without a chance, some do here.
            asking += chance.sample(idle, min(len(idle), ASKING if following or ends else 10**6))
            for worker in asking:
                while site.free[worker]:
                    taken = site.ask(worker, outcome)
                    if taken is None:
                        break
                    outcome.starts[site.jobs[taken].number] = moment
                    heapq.heappush(ends, (moment + site.jobs[taken].seconds, taken))
    return outcome


def main() -> None:
    """Run the trace in every order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--known", action="store_true", help="leave out lengths not known")
    options = parser.parse_known_args()[0]
    trace = made(options.runs, options.workers)
    orders = {
        "FIFO, in plain Python": plain(trace, options.workers, fills_in=False),
        "EASY, in plain Python": plain(trace, options.workers, fills_in=True),
    }
    for name, knows in (("Halfstep", True), ("Halfstep, lengths not known", False)):
        if options.known and not knows:
            continue
        with databases.postgresql() as database:
            orders[name] = product(database, trace, options.workers, options.patience, knows=knows)
    rows = []
    for name, outcome in orders.items():
        took = sorted(outcome.claims) or [math.nan]
        times = [f"{took[int(len(took) * share)]:.1f}" for share in (0.5, 0.95)]
        rows.append((*outcome.row(name, trace, options.workers * DEVICES), *times))
    found = orders["Halfstep"]
    p95 = sorted(found.claims)[int(len(found.claims) * 0.95)]
    longest = {name: max(_waits(each, trace)) for name, each in orders.items()}
    fifo = longest["FIFO, in plain Python"]
    halfstep = longest["Halfstep"]
    report(
        "gangs",
        f"a claim's p95 ≤ {BAR_MS:g} ms; nobody waits longer than the longest of FIFO's",
        (
            *("order", "utilisation", "all done", "small: median wait, min", "longest"),
            *("gangs: median wait, min", "longest", "claim, ms, p50", "p95"),
        ),
        rows,
        measured=f"p95 {p95:.1f} ms of {len(found.claims):,} claims, {len(trace):,} runs on "
        f"{options.workers} workers × {DEVICES}; longest {halfstep / HOUR:.1f} h, FIFO's "
        f"{fifo / HOUR:.1f} h",
        passed=p95 <= BAR_MS and halfstep <= fifo,
    )


def _waits(outcome: Outcome, trace: list[Job]) -> list[float]:
    return [outcome.starts[job.number] - job.comes for job in trace]


if __name__ == "__main__":
    main()
