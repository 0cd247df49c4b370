"""Many metric names in one run through HTTP: recording time, and the wait of an edit.

A run logs 10,000 names in each of 20 steps. Its pieces are those that an uploader sends, made
before the clock starts; meanwhile a person edits the note of another run repeatedly. Then the page
of the run, the list and the API are each requested five times, and the slowest answer counts.
"""

import gzip
import tempfile
import threading
import time
from pathlib import Path

import httpx2

from benchmarks import databases
from benchmarks.report import report
from benchmarks.site import Site, serving_from
from db.database import Database
from db.telemetry import metric_blocks
from halfstep.telemetry import events
from halfstep.telemetry.spool import SpoolWriter

NAMES, STEPS = 10_000, 20
PIECE_BYTES = 2**20
BAR_SECONDS, BAR_WAIT_SECONDS, BAR_ANSWER_SECONDS = 25.0, 0.3, 0.5
#: URLs by name that are requested once the run is recorded.
ASKED = {
    "page": "/runs/{run}",
    "search": "/runs/{run}?metric_search=u99",
    "list": "/runs?columns=g050/u50&filter=g050/u50>1",
    "series": "/api/v1/runs/{run}/series",
    "summary": "/api/v1/runs/{run}/metrics/summary?metric_search=u99&metric_after=g050",
    "points": "/api/v1/runs/{run}/metrics",
    "autocomplete": "/api/v1/runs/autocomplete",
}
TIMES = 5


def spool() -> bytes:
    """Return the spool of a run that logs every name in every step."""
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        with SpoolWriter(Path(folder), 1, rotate_bytes=2**40) as writer:
            for step in range(1, STEPS + 1):
                for name in range(NAMES):
                    named = f"g{name // 100:03d}/u{name % 100:02d}"
                    value, elapsed_ms = float(name + step), step * 100
                    event = events.Metric(step=step, name=named, value=value, elapsed_ms=elapsed_ms)
                    writer.event(event)
        return (Path(folder) / "1-0.spool").read_bytes()


def begin(site: Site, client: httpx2.Client, number: int) -> int:
    """Begin a watched run; return its id."""
    run = {"id": f"{number:032x}", "attempt": 1, "name": f"run {number}"}
    run["started"] = "2026-01-01T00:00:00+00:00"
    answer = client.post(f"{site.address}/api/v1/ingest", json=run)
    return int(answer.raise_for_status().json()["run"])


def send(site: Site, client: httpx2.Client, run: int, content: bytes) -> float:
    """Send a spool in pieces; return the seconds until all is recorded."""
    offset, started = 0, time.perf_counter()
    while offset < len(content):
        piece = gzip.compress(content[offset : offset + PIECE_BYTES], 1)
        answer = client.put(
            f"{site.address}/api/v1/ingest/{run}/1/0",
            params={"offset": offset},
            content=piece,
            headers={"Content-Encoding": "gzip"},
        )
        offset = answer.raise_for_status().json()["offset"]
    return time.perf_counter() - started


def edit(url: str, client: httpx2.Client, stop: threading.Event, waits: list[float]) -> None:
    """Edit a run's note until `stop` is set; append each edit's time to `waits`."""
    while not stop.is_set():
        started = time.perf_counter()
        body = {"note": f"{started}"}
        client.patch(url, json=body).raise_for_status()
        waits.append(time.perf_counter() - started)
        time.sleep(0.05)


def slowest(site: Site, client: httpx2.Client, run: int) -> dict[str, float]:
    """Return the seconds of the slowest response of each URL."""
    found = {}
    for name, address in ASKED.items():
        client.get(site.address + address.format(run=run))  # which compiles templates and queries
        seconds = []
        for _ in range(TIMES):
            started = time.perf_counter()
            client.get(site.address + address.format(run=run)).raise_for_status()
            seconds.append(time.perf_counter() - started)
        found[name] = max(seconds)
    return found


def measure(database: Database) -> tuple[float, float, int, dict[str, float]]:
    """Return the recording's seconds, an edit's longest wait, the number of edits, and the
    slowest responses.
    """
    content, waits, stop = spool(), list[float](), threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder,
        serving_from(database, folder, 0) as site,
    ):
        headers = {"Authorization": f"Bearer {site.token()}"}
        with (
            httpx2.Client(headers=headers, timeout=None) as sender,
            httpx2.Client(headers=headers, timeout=None) as person,
        ):
            run, other = begin(site, sender, 1), begin(site, person, 2)
            url = f"{site.address}/api/v1/runs/{other}"
            editor = threading.Thread(target=edit, args=(url, person, stop, waits))
            editor.start()
            try:
                seconds = send(site, sender, run, content)
            finally:
                stop.set()
                editor.join()
            answers = slowest(site, person, run)
        with database.reading() as session:
            assert metric_blocks.count(session.connection(), run) >= NAMES * STEPS
    return seconds, max(waits), len(waits), answers


def main() -> None:
    """Measure both databases."""
    rows, took, longest, latest = [], 0.0, 0.0, 0.0
    for name, opened in (("SQLite", databases.sqlite), ("PostgreSQL", databases.postgresql)):
        with opened() as database:
            seconds, wait, edits, answers = measure(database)
        took, longest = max(took, seconds), max(longest, wait)
        latest = max(latest, *answers.values())
        milliseconds = [f"{answer * 1000:.0f}" for answer in answers.values()]
        rows.append((name, f"{seconds:.1f}", edits, f"{wait * 1000:.0f}", *milliseconds))
    report(
        "many_names",
        f"{NAMES:,} names × {STEPS} steps recorded in ≤ {BAR_SECONDS:g} s; "
        f"an edit waits ≤ {BAR_WAIT_SECONDS * 1000:g} ms; "
        f"each answer takes ≤ {BAR_ANSWER_SECONDS * 1000:g} ms",
        (
            *("database", "recorded, s", "edits meanwhile", "longest wait of an edit, ms"),
            *(f"{name}, ms" for name in ASKED),
        ),
        rows,
        measured=f"{took:.1f} s, {longest * 1000:.0f} ms, {latest * 1000:.0f} ms",
        passed=took <= BAR_SECONDS and longest <= BAR_WAIT_SECONDS and latest <= BAR_ANSWER_SECONDS,
    )


if __name__ == "__main__":
    main()
