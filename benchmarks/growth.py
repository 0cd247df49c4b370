"""Growth of response times with the number of runs and with the steps of a run.

    python -m benchmarks.growth [--rounds 15] [--most-steps 10000000] [--save]
        [--databases SQLite PostgreSQL] [--of runs steps]

A slope is that of the time over the amount, both on a log scale: 0 is no growth, and 1 is growth in
proportion. The times of pages and workers must not grow; a backup copies everything, so it grows.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import httpx2
import numpy as np

from benchmarks import databases, run_list, synthetic
from benchmarks.report import report
from benchmarks.site import Site, serving_from
from db.database import Database
from db.files import backup
from db.files.object_store import open_store
from db.queue import claims, queue, workers
from db.tables import Status

RUN_COUNTS = (100, 1000, 10_000)
STEP_COUNTS = (10_000, 100_000, 1_000_000, 10_000_000)
COMPARED, RECORDED = 20, (10, 1000)
#: Steps of the flushes that are timed.
SEALED = 16_384
BAR = 0.2
BACKUP = "backup, s"
DATABASES: dict[str, Callable[[], AbstractContextManager[Database]]] = {
    "SQLite": databases.sqlite,
    "PostgreSQL": databases.postgresql,
}
#: Times by measurement: medians in milliseconds, a backup in seconds.
Times = Mapping[str, float]


def of_requests(site: Site, addresses: Mapping[str, str], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each page or response."""
    headers = {"Authorization": f"Bearer {site.token()}"}
    with httpx2.Client(base_url=site.address, headers=headers) as client:
        return {
            name: statistics.median(run_list.times(client, address, None, rounds))
            for name, address in addresses.items()
        }


def of_claims(database: Database, rounds: int) -> float:
    """Return the median milliseconds of a claim; each run ends before the next claim."""
    device = {"kind": "cpu", "index": 0, "memory_bytes": 2**30, "fp16": True, "bf16": True}
    with database.writing() as session:
        offer: dict[str, Any] = {"devices": [device], "recipes": [], "versions": {}}
        worker_id = workers.register(session, name="growth", host="here", pid=1, **offer).id
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        with database.writing() as session:
            run = claims.claim(
                session,
                worker_id,
                recipes=["synthetic"],
                precisions=["fp16", "bf16", "fp32"],
                free_devices=[0],
                lease_seconds=1e6,
            )
        found.append((time.perf_counter() - started) * 1000)
        assert run is not None
        with database.writing() as session:
            queue.end(session, run.id, run.attempt, Status.FINISHED)
    return statistics.median(found)


def of_backup(site: Site) -> float:
    """Return the seconds of a full backup."""
    started = time.perf_counter()
    backup.back_up(site.database, open_store(site.settings), site.settings.data / "backup")
    return time.perf_counter() - started


def of_runs(
    opened: Callable[[], AbstractContextManager[Database]], runs: int, rounds: int
) -> Times:
    """Return the times with this number of runs."""
    trained = range(runs // 2, 0, -run_list.TRAINED_EVERY)[:COMPARED]
    compared = ",".join(map(str, trained))
    with tempfile.TemporaryDirectory() as folder, opened() as database:
        run_list.fill(database, runs)
        with serving_from(database, folder, 0) as site:
            addresses = {
                "list page": "/runs",
                "filter and order": "/api/v1/runs?filter=skips>10&sort=-loss&limit=50",
                "run page": f"/runs/{trained[0]}",
                "comparison page": f"/compare?runs={compared}",
            }
            found = of_requests(site, addresses, rounds)
            return {**found, "claim": of_claims(database, rounds), BACKUP: of_backup(site)}


def of_steps(
    opened: Callable[[], AbstractContextManager[Database]], steps: int, rounds: int
) -> Times:
    """Return the times with a run of this number of steps, compared with one of 1,000."""
    with tempfile.TemporaryDirectory() as folder, opened() as database:
        short, long = synthetic.start_run(database), synthetic.start_run(database)
        for run_id, length in ((short, 1000), (long, steps)):
            for flush in synthetic.flushes(length):
                synthetic.record(database, run_id, flush)
        with serving_from(database, folder, 0) as site:
            window = f"first={steps // 2}&last={steps // 2 + 2000}"
            addresses = {
                "list page": "/runs",
                "run page": f"/runs/{long}",
                "all steps": f"/api/v1/runs/{long}/series",
                "a window of 2,000": f"/api/v1/runs/{long}/series?{window}",
                "comparison page": f"/compare?runs={short},{long}",
                "comparison's curves": f"/api/v1/comparison/series?runs={short},{long}&series=loss",
            }
            found = of_requests(site, addresses, rounds)
            found |= of_recording(database, long, steps)
            return {**found, BACKUP: of_backup(site)}


def of_recording(database: Database, run_id: int, steps: int) -> dict[str, float]:
    """Return the mean CPU milliseconds of flushes of further steps, with seals."""
    found = {}
    for number in RECORDED:
        last = steps + SEALED
        flushes = list(synthetic.flushes(last, number, first=steps + 1))
        started = time.process_time()
        for flush in flushes:
            synthetic.record(database, run_id, flush)
        seconds = time.process_time() - started
        found[f"flush of {number:,}, CPU"] = seconds / len(flushes) * 1000
        steps = last
    return found


def slope(amounts: list[int], times: list[float]) -> float:
    """Return the slope of time over amount, both on a log scale."""
    return float(np.polyfit(np.log(amounts), np.log(times), 1)[0])


def main() -> None:
    """Measure both kinds of growth on both databases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most-steps", type=int, default=STEP_COUNTS[-1])
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=[*DATABASES])
    parser.add_argument("--of", nargs="+", choices=("runs", "steps"), default=["runs", "steps"])
    options = parser.parse_known_args()[0]
    step_counts = [each for each in STEP_COUNTS if each <= options.most_steps]
    rows: list[tuple[str, ...]] = []
    slopes: dict[str, float] = {}
    kinds = {"runs": (list(RUN_COUNTS), of_runs), "steps": (step_counts, of_steps)}
    for name, opened in ((name, DATABASES[name]) for name in options.databases):
        for what in options.of:
            amounts, measure = kinds[what]
            measured = [measure(opened, amount, options.rounds) for amount in amounts]
            for key in measured[0]:
                times = [each[key] for each in measured]
                grows = slope(amounts, times)
                if key != BACKUP:
                    slopes[f"{key} by {what}, {name}"] = grows
                cells = [f"{each:.1f}" for each in times] + ["–"] * (len(STEP_COUNTS) - len(times))
                rows.append((name, what, key, *cells, f"{grows:.2f}"))
    steepest = max(slopes, key=lambda each: slopes[each])
    report(
        "growth",
        f"slope ≤ {BAR:g} of all but a backup",
        (
            *("database", "more", "ms, median"),
            *("100 runs or 10,000 steps", "1,000 or 100,000", "10,000 or 1,000,000"),
            *("10,000,000 steps", "slope"),
        ),
        rows,
        measured=f"at most {slopes[steepest]:.2f} ({steepest})",
        passed=slopes[steepest] <= BAR,
    )


if __name__ == "__main__":
    main()
