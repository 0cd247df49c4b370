"""Load of PostgreSQL by idle workers, with notifications and by polling without them.

    python -m benchmarks.idle_workers [--workers 200] [--seconds 30]

The workers are real ones in threads of one process; only the probe of their devices is replaced,
and each reports one device. The benchmark measures the processor time of all of PostgreSQL's
processes. With a few workers, since threads of one process take turns, it also measures how long
a submitted run waits for its claim.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import event, text

from benchmarks import databases
from benchmarks.report import report
from db.access import accounts
from db.database import Database
from db.queue import workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, RunNode
from halfstep.telemetry.plain_json import JsonObject
from worker.daemon import Worker

BAR_SHARE = 0.05  # of a core
BAR_QUERIES = 1.0  # of a worker, in five seconds
BAR_START = 0.3  # seconds
SUBMISSIONS = FEW = 8
WARMING_SECONDS = 8.0


class Waiting(Worker):
    """A worker with fixed capabilities that records claims instead of starting runs."""

    claimed: dict[int, float]

    def _register(self) -> None:
        device: JsonObject = {
            "index": 0,
            "kind": "cpu",
            "memory_bytes": 2**33,
            "fp16": True,
            "bf16": True,
        }
        recipe: JsonObject = {"name": "digits", "title": "", "description": "", "schema": {}}
        self.device_indexes, self.recipes = {0}, ["digits"]
        self.precisions, self.device_memory_bytes = ["fp32", "fp16", "bf16"], 2.0**33
        with self.database.writing() as session:
            self.id = workers.register(
                session,
                name=self.name,
                host="h",
                pid=1,
                devices=[device],
                recipes=[recipe],
                versions={"torch": "2.13.0"},
            ).id

    def _update_recipes(self) -> None:
        """Do nothing, since the recipes do not change here."""

    def _launch(self, node: RunNode) -> None:
        self.claimed[node.run_id] = time.monotonic()


@contextmanager
def waiting(
    database: Database, count: int, tally: Callable[..., None], *, by_word: bool
) -> Iterator[dict[int, float]]:
    """Run this many waiting workers; yield the claim times. tally: called at each query."""
    claimed: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        some = []
        for number in range(count):
            own = Settings(
                data=Path(folder), database_url=str(database.engine.url), worker_name=f"w{number}"
            )
            worker = Waiting(own, Database(own.database_url))
            event.listen(worker.database.engine, "before_cursor_execute", tally)
            worker.claimed = claimed
            if not by_word:
                worker.listener.start = lambda: None  # type: ignore[method-assign]
            some.append(worker)
        threads = [threading.Thread(target=each.run) for each in some]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 600
        while by_word and not all(each.listener.is_listening for each in some):
            assert time.monotonic() < deadline, "no word comes"
            time.sleep(0.1)
        time.sleep(WARMING_SECONDS)
        yield claimed
        for each in some:
            each.stop()
        for thread in threads:
            thread.join()
        for each in some:
            each.database.dispose()


def processor_seconds(database: Database) -> float:
    """Return the CPU seconds that all of the server's processes have used so far."""
    with database.read_only() as session:
        folder = session.scalar(text("SELECT current_setting('data_directory')"))
    pid = int((Path(str(folder)) / "postmaster.pid").read_text().split()[0])
    server = psutil.Process(pid)
    used = 0.0
    for each in [server, *server.children()]:
        times = each.cpu_times()
        used += times.user + times.system
    return used


def idling(database: Database, count: int, seconds: float, *, by_word: bool) -> dict[str, Any]:
    """Let workers idle; return the number and the cost of their queries."""
    statements = [0]

    def tally(*_: object) -> None:
        statements[0] += 1

    with waiting(database, count, tally, by_word=by_word):
        before = processor_seconds(database)
        asked_before, started = statements[0], time.monotonic()
        time.sleep(seconds)
        asked, took = statements[0] - asked_before, time.monotonic() - started
        used = processor_seconds(database) - before
    return {"share": used / took, "queries": asked / count / took * 5}


def starting(database: Database, *, by_word: bool) -> list[float]:
    """Return the waits of runs that are submitted to idle workers one after the other."""
    with waiting(database, FEW, lambda *_: None, by_word=by_word) as claimed:
        return [_submit(database, claimed) for _ in range(SUBMISSIONS)]


def _submit(database: Database, claimed: dict[int, float]) -> float:
    """Submit a run; return its wait."""
    config = {"precision": "fp32", "training": {"steps": 10}}
    with database.writing() as session:
        owner = accounts.user_named(session, "ada")
        run_id = runs.submit(session, owner, Run(recipe="digits", config=config)).id
    since = time.monotonic()
    while run_id not in claimed:
        time.sleep(0.001)
    return claimed[run_id] - since


def main() -> None:
    """Measure both cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_known_args()[0]
    rows, found = [], {}
    for name, by_word in (("looking", False), ("by word", True)):
        with databases.postgresql(connections=3 * options.workers) as database:
            one = idling(database, options.workers, options.seconds, by_word=by_word)
        with databases.postgresql() as database:
            one["waits"] = starting(database, by_word=by_word)
        found[name] = one
        median, longest = statistics.median(one["waits"]), max(one["waits"])
        rows.append(
            (
                name,
                f"{100 * one['share']:.1f} %",
                f"{one['queries']:.2f}",
                f"{1000 * median:.0f} ms",
                f"{1000 * longest:.0f} ms",
            )
        )
    idle = found["by word"]
    report(
        "idle_workers",
        f"by word ≤ {100 * BAR_SHARE:g} % of a core for {options.workers} that wait, ≤ "
        f"{BAR_QUERIES:g} query of each in 5 s, a claim within {BAR_START:g} s",
        ("workers", "PostgreSQL, of a core", "queries of one in 5 s", "claimed in", "longest"),
        rows,
        measured=f"{100 * idle['share']:.1f} %, {idle['queries']:.2f} queries, "
        f"{max(idle['waits']):.2f} s",
        passed=idle["share"] <= BAR_SHARE
        and idle["queries"] <= BAR_QUERIES
        and max(idle["waits"]) <= BAR_START,
    )


if __name__ == "__main__":
    main()
