"""Steps of watched runs recorded a second through HTTP, from one uploader and from twenty at once.

The pieces are those that an uploader sends, compressed with gzip before the clock starts. The
server runs in its own process on a durable database; its memory is read after each piece.
"""

import gzip
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx2
import psutil

from benchmarks import databases, synthetic
from benchmarks.report import report
from benchmarks.site import Site, serving_from
from db.database import Database
from halfstep.telemetry.spool import SpoolReader, SpoolWriter

STEPS = 600_000  # over all runs
PIECE_BYTES = 2**20
FRAME_STEPS = 200  # what a loop hands over at a time
ROUNDS = 3
BAR, MEMORY_BAR = 100_000, 1.1


def pieces_of(steps: int) -> list[tuple[int, bytes]]:
    """Spool a run; return its compressed pieces with their offsets."""
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        with SpoolWriter(Path(folder), 1, rotate_bytes=2**40) as spool:
            for flush in synthetic.flushes(steps):
                for event in flush.events:
                    spool.event(event)
                for first in range(0, len(flush.steps[0]), FRAME_STEPS):
                    spool.steps(flush.steps[0][first : first + FRAME_STEPS])
        content = (Path(folder) / "1-0.spool").read_bytes()
        reader, ends = SpoolReader(Path(folder)), [0]
        while reader.poll(PIECE_BYTES):
            ends.append(reader.position().offset)  # type: ignore[union-attr]
    ends[-1] = len(content)
    return [(first, gzip.compress(content[first:last], 1)) for first, last in pairwise(ends)]


class Load:
    """Uploaders of one server, each with its own run."""

    def __init__(self, site: Site) -> None:
        self.site, self.resident_mib, self._made = site, list[float](), 0
        self._headers = {"Authorization": f"Bearer {site.token()}"}
        self._lock = threading.Lock()

    def steps_a_second(self, runs: int) -> float:
        """Send this many runs at once; return their total steps per second."""
        pieces = pieces_of(STEPS // runs)
        with ThreadPoolExecutor(runs) as pool:
            addresses = list(pool.map(self._begin, range(runs)))
            started = time.perf_counter()
            list(pool.map(lambda address: self._send(address, pieces), addresses))
            return STEPS / (time.perf_counter() - started)

    def _begin(self, _number: int) -> str:
        with self._lock:
            self._made += 1
            body = {"id": f"{self._made:032x}", "attempt": 1, "name": f"run {self._made}"}
        address = f"{self.site.address}/api/v1/ingest"
        body |= {"started": "2026-01-01T00:00:00+00:00"}
        answer = httpx2.post(address, json=body, headers=self._headers, timeout=None)
        return f"{address}/{answer.raise_for_status().json()['run']}/1/0"

    def _send(self, address: str, pieces: list[tuple[int, bytes]]) -> None:
        headers = {**self._headers, "Content-Encoding": "gzip"}
        with httpx2.Client(headers=headers, timeout=None) as client:
            for offset, piece in pieces:
                answer = client.put(address, params={"offset": offset}, content=piece)
                answer.raise_for_status()
                self.resident_mib.append(_resident_mib(self.site.server))


def _resident_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 2**20)


def measure(database: Database, runs: int) -> tuple[list[float], float, float]:
    """Return each round's speed, the server's peak memory, and last ÷ first third of it.

    A first round, in which the server loads what it needs, does not count.
    """
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder,
        serving_from(database, folder, 0) as site,
    ):
        load = Load(site)
        load.steps_a_second(runs)
        load.resident_mib.clear()
        speeds = [load.steps_a_second(runs) for _ in range(ROUNDS)]
        third = len(load.resident_mib) // 3
        first, last = load.resident_mib[:third], load.resident_mib[-third:]
        growth = statistics.mean(last) / statistics.mean(first)
        return speeds, max(load.resident_mib), growth


def main() -> None:
    """Measure each database with one run and with twenty."""
    rows, slowest, most_growth = [], float("inf"), 0.0
    for name, opened in (("SQLite", databases.sqlite), ("PostgreSQL", databases.postgresql)):
        for runs in (1, 20):
            with opened() as database:
                speeds, most_mib, growth = measure(database, runs)
            middle = statistics.median(speeds)
            slowest, most_growth = min(slowest, middle), max(most_growth, growth)
            figures = (f"{middle:,.0f}", f"{max(speeds):,.0f}", f"{most_mib:.0f}", f"{growth:.3f}")
            rows.append((name, runs, *figures))
    header = ("database", "runs at once", "steps/s, median of 3 rounds", "best")
    report(
        "ingest",
        f"≥ {BAR:,} steps/s through HTTP; the server's memory, last ÷ first third, "
        f"≤ {MEMORY_BAR:g}",
        (*header, "server's memory at its most, MiB", "last ÷ first third"),
        rows,
        measured=f"{slowest:,.0f} steps/s on the slowest, memory {most_growth:.3f}",
        passed=slowest >= BAR and most_growth <= MEMORY_BAR,
    )


if __name__ == "__main__":
    main()
