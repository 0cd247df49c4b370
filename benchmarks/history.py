"""Frozen steps: bytes a step, and how long charts of ended runs take.

    python -m benchmarks.history [--steps 10000000] [--compared-steps 1000000] [--ended 100]

--ended: runs of 10,000 steps, of which the bytes of 10,000 such runs are estimated. The bucket is a
server that answers each request LATENCY_SECONDS later than it could; no bar is about it. It shares
the processor, and a window takes one request's time in addition to what it takes from a folder.
"""

import argparse
import math
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from obstore.store import LocalStore, ObjectStore
from sqlalchemy import func, insert, literal, select

from benchmarks import synthetic
from benchmarks.report import report
from db.database import RETRY_SECONDS, Database
from db.files.object_store import open_store
from db.files.step_files import StepFiles
from db.queue import queue
from db.settings import Settings
from db.tables import FrozenSteps, Run, ScalerEvent, Status, Step, StepBucket
from db.telemetry import freeze, windows

COMPARED, WINDOWS, ROUNDS = 20, 300, 15
ENDED_STEPS, ALL_ENDED = 10_000, 10_000
#: In bytes a step, milliseconds, seconds and megabytes.
BARS = {"bytes": 12.0, "open": 50.0, "p99": 50.0, "compare": 0.25, "database": 300.0}
LATENCY_SECONDS = 0.02


def serve(folder: Path, pipe: Connection) -> None:
    """Serve ranges of files as a bucket does; send the port, then each time the requests so far."""
    requests = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and content at once
        disable_nagle_algorithm = True  # which would delay content that is longer by 40 ms

        def do_GET(self) -> None:
            nonlocal requests
            requests += 1
            time.sleep(LATENCY_SECONDS)
            path = folder / self.path.removeprefix("/bench/")
            size_bytes = path.stat().st_size
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"])
            assert span is not None
            start, last = int(span[1]), min(int(span[2]), size_bytes - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{last}/{size_bytes}")
            self.send_header("Content-Length", str(last - start + 1))
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
            self.send_header("ETag", '"0"')
            self.end_headers()
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(last - start + 1))

        def log_message(self, *_words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_port)
    while pipe.recv():
        pipe.send(requests)


@dataclass(frozen=True)
class Bucket:
    """A bucket with the files of a folder."""

    store: ObjectStore
    pipe: Connection

    def requests(self) -> int:
        """Return the number of requests so far."""
        self.pipe.send(True)
        return int(self.pipe.recv())


@contextmanager
def bucket_of(folder: Path) -> Iterator[Bucket]:
    """Serve a folder from a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=serve, args=(folder, its))
    process.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
    }
    store = open_store(Settings(storage_url="s3://bench"), retry_seconds=RETRY_SECONDS)
    yield Bucket(store, ours)
    ours.send(False)
    process.join()


def recorded(database: Database, steps: int) -> int:
    """Record and end a run of so many steps."""
    run_id = synthetic.start_run(database)
    for flush in synthetic.flushes(steps, 50_000):
        synthetic.record(database, run_id, flush)
    with database.writing() as session:
        queue.end(session, run_id, 1, Status.FINISHED)
    return run_id


def copied(database: Database, source: int) -> int:
    """Make a run with the history of another: quicker than to record it."""
    run_id = synthetic.start_run(database)
    with database.writing() as session:
        connection = session.connection()
        for kind in (Step, StepBucket, ScalerEvent):
            table = kind.__table__
            names = [column.name for column in table.c if column.name != "id"]
            values = [literal(run_id) if name == "run_id" else table.c[name] for name in names]
            rows = select(*values).where(table.c.run_id == source)
            connection.execute(insert(kind).from_select(names, rows))
        run, original = session.get_one(Run, run_id), session.get_one(Run, source)
        for name in ("step", "skipped", "recorded_steps"):
            setattr(run, name, getattr(original, name))
        queue.end(session, run_id, 1, Status.FINISHED)
    return run_id


def frozen(database: Database, store: ObjectStore, run_ids: list[int], folder: Path) -> float:
    """Freeze runs; return the seconds."""
    started = time.perf_counter()
    for run_id in run_ids:
        freeze.freeze(database, store, run_id, folder=folder, stopping=Event())
    return time.perf_counter() - started


def used_bytes(database: Database) -> int:
    """Return the bytes of SQLite's pages with content."""
    with database.engine.connect() as connection:
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


class Times(NamedTuple):
    """Milliseconds of calls and of the processor, each in order; other programs slow the former."""

    wall: list[float]
    processor: list[float]

    def at(self, share: float) -> tuple[float, float]:
        """Return the quantile of both."""
        index = max(0, round(len(self.wall) * share) - 1)
        return self.wall[index], self.processor[index]


def timed(calls: Iterable[Callable[[], object]]) -> Times:
    """Return how long calls take."""
    times = []
    for call in calls:
        started, worked = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - started, time.process_time() - worked))
    return Times(*(sorted(1000 * each for each in column) for column in zip(*times, strict=True)))


def opened(
    database: Database, run_id: int, first: int | None = None, last: int | None = None
) -> None:
    """Read the charts of a run."""
    with database.reading() as session:
        assert windows.window(session, run_id, first=first, last=last) is not None


def compared(database: Database, run_ids: list[int]) -> None:
    """Read the losses of runs, as their comparison does."""
    with database.reading() as session:
        found = windows.windows_of(session, run_ids, most=1000, names={"loss"})
    assert len(found) == len(run_ids)


def random_windows(database: Database, run_id: int, steps: int) -> Times:
    """Measure windows whose lengths are spread over the powers of ten."""
    choose, calls = random.Random(0), []
    for _ in range(WINDOWS):
        length = int(10 ** choose.uniform(0, math.log10(steps)))
        first = choose.randint(1, steps - length + 1)
        calls.append(partial(opened, database, run_id, first, first + length - 1))
    return timed(calls)


class Charts(NamedTuple):
    """How long charts of a run take: opened by a new process, opened again, and random windows.

    requests: to the bucket, of the first open and of all windows.
    """

    first: Times
    again: Times
    windows: Times
    requests: tuple[int, int]


def charts(
    url: str, store: ObjectStore, run_id: int, steps: int, requests: Callable[[], int] = lambda: 0
) -> Charts:
    """Measure the charts of a run, with caches of a process that has just started."""
    database = Database(url, StepFiles(lambda: store))
    counts = [requests()]
    first = timed([partial(opened, database, run_id)])
    counts.append(requests())
    again = timed([partial(opened, database, run_id)] * ROUNDS)
    counts.append(requests())
    randomly = random_windows(database, run_id, steps)
    counts.append(requests())
    database.dispose()
    return Charts(first, again, randomly, (counts[1] - counts[0], counts[3] - counts[2]))


def main() -> None:
    """Measure from rows, freeze, and measure from files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--compared-steps", type=int, default=1_000_000)
    parser.add_argument("--ended", type=int, default=100)
    options = parser.parse_known_args()[0]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = LocalStore(folder)
        files = StepFiles(lambda: store)

        def fresh(path: str) -> Database:
            database = Database(f"sqlite:///{folder / path}", files)
            database.migrate()
            return database

        def add(what: str, *figures: float | None, digits: int = 1) -> None:
            texts = ["" if each is None else f"{each:.{digits}f}" for each in figures]
            rows.append([what, *texts, *[""] * (3 - len(texts))])

        def add_times(what: str, *times: tuple[float, float]) -> float:
            add(f"{what}, processor ms", *(processor for _, processor in times))
            add(f"{what}, ms", *(wall for wall, _ in times))
            return times[1][0]

        database = fresh("long.db")
        url = str(database.engine.url)
        long = recorded(database, options.steps)
        size = used_bytes(database)
        long_run = (long, options.steps)
        before = charts(url, store, *long_run)
        seconds = frozen(database, store, [long], folder)
        with database.reading() as session:
            file_bytes = session.scalar(select(func.sum(FrozenSteps.size_bytes))) or 0
        after = charts(url, store, *long_run)
        with bucket_of(folder) as bucket:
            from_bucket = charts(url, bucket.store, *long_run, bucket.requests)
        all_charts = (before, after, from_bucket)
        add("bytes a step in the file", None, file_bytes / options.steps, digits=2)
        add_times("open, first time", *(each.first.at(1.0) for each in all_charts))
        found = {
            "bytes": file_bytes / options.steps,
            "open": add_times("open, median", *(each.again.at(0.5) for each in all_charts)),
            "p99": add_times(
                "random windows, p99", *(each.windows.at(0.99) for each in all_charts)
            ),
        }
        add_times("random windows, median", *(each.windows.at(0.5) for each in all_charts))
        add("requests of the first open", None, None, from_bucket.requests[0], digits=0)
        add("requests a random window", None, None, from_bucket.requests[1] / WINDOWS, digits=2)
        left = used_bytes(database)
        add("bytes a step in the database", size / options.steps, left / options.steps, digits=2)
        add("freeze, µs a step", None, seconds / options.steps * 1e6)
        database.dispose()

        database = fresh("compared.db")
        ids = [recorded(database, options.compared_steps)]
        ids += [copied(database, ids[0]) for _ in range(COMPARED - 1)]
        compared(database, ids)
        rounds = timed([partial(compared, database, ids)] * ROUNDS)
        frozen(database, store, ids, folder)
        compared(database, ids)
        again = timed([partial(compared, database, ids)] * ROUNDS)
        what = f"{COMPARED} runs × {options.compared_steps:,} steps compared, median"
        found["compare"] = add_times(what, rounds.at(0.5), again.at(0.5)) / 1000
        database.dispose()

        database = fresh("ended.db")
        empty = used_bytes(database)
        ids = [recorded(database, ENDED_STEPS) for _ in range(options.ended)]
        sizes = [used_bytes(database)]
        frozen(database, store, ids, folder)
        sizes.append(used_bytes(database))
        per_run = [(each - empty) / options.ended * ALL_ENDED / 1e6 for each in sizes]
        what = (
            f"database, MB of {ALL_ENDED:,} ended runs of {ENDED_STEPS:,} steps, by {options.ended}"
        )
        add(what, *per_run)
        found["database"] = per_run[1]
        database.dispose()
    limits = ", ".join(f"{key} ≤ {bar:g}" for key, bar in BARS.items())
    report(
        "history",
        f"{limits}; {options.steps:,} steps",
        ("", "rows", "frozen", f"in a bucket with {1000 * LATENCY_SECONDS:.0f} ms"),
        rows,
        measured=", ".join(f"{key} {value:.3g}" for key, value in found.items()),
        passed=all(found[key] <= bar for key, bar in BARS.items()),
    )


if __name__ == "__main__":
    main()
