"""Memory of a server in use: viewers of short runs, and exports and charts of a long one.

`python -m benchmarks.soak --minutes 60`. Each minute ten runs are submitted, recorded and watched
by fifty viewers; meanwhile the long run is exported as CSV and Parquet, and its charts are read at
random zooms. The memory after a pause shows what the server keeps without any requests.
"""

import argparse
import asyncio
import random
import statistics
import time

import httpx2

from benchmarks import synthetic
from benchmarks.report import report
from benchmarks.site import Site, serving
from db.queue import queue

LONG_STEPS = 1_000_000
SHORT_RUNS, VIEWERS = 10, 50
STEPS_AN_UPDATE = 40
SAMPLE_SECONDS, ROUND_SECONDS = 2.0, 60.0
BAR = 1.1


async def watch_short_runs(site: Site, client: httpx2.AsyncClient, end: float) -> None:
    """Record short runs with their viewers, a round each minute."""
    while time.monotonic() < end:
        run_ids = [synthetic.start_run(site.database) for _ in range(SHORT_RUNS)]
        with site.database.writing() as session:
            for run_id in run_ids:
                queue.start(session, run_id, 1)
        viewers = [
            asyncio.create_task(_view(client, run_ids[number % SHORT_RUNS]))
            for number in range(VIEWERS)
        ]
        steps = STEPS_AN_UPDATE * int(ROUND_SECONDS)
        for flush in synthetic.flushes(steps, STEPS_AN_UPDATE):
            begun = time.monotonic()
            for run_id in run_ids:
                await asyncio.to_thread(synthetic.record, site.database, run_id, flush)
            await asyncio.sleep(max(begun + 1 - time.monotonic(), 0))
            if time.monotonic() >= end:
                break
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)


async def _view(client: httpx2.AsyncClient, run_id: int) -> None:
    async with client.stream("GET", f"/api/v1/runs/{run_id}/live") as response:
        async for _ in response.aiter_bytes():
            pass


async def export_long_run(client: httpx2.AsyncClient, end: float) -> None:
    """Export the long run repeatedly, and discard the output."""
    formats = ("csv", "parquet")
    number = 0
    while time.monotonic() < end:
        address = f"/api/v1/runs/1/export/steps.{formats[number % 2]}"
        async with client.stream("GET", address) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass
        number += 1


async def zoom_long_run(client: httpx2.AsyncClient, end: float) -> None:
    """Read the long run's charts at random zooms."""
    chance = random.Random(0)
    while time.monotonic() < end:
        first = chance.randrange(LONG_STEPS)
        last = chance.randrange(first, LONG_STEPS) + 1
        response = await client.get(f"/api/v1/runs/1/series?first={first}&last={last}")
        response.raise_for_status()
        await asyncio.sleep(0.2)


async def sample(site: Site, end: float) -> list[float]:
    """Return the server's MiB every SAMPLE_SECONDS."""
    resident = []
    while time.monotonic() < end:
        resident.append(site.server.memory_info().rss / 2**20)
        await asyncio.sleep(SAMPLE_SECONDS)
    return resident


def measure_parts(site: Site) -> dict[str, float]:
    """Return the server's MiB by their use."""
    parts = dict.fromkeys(("all", "libraries", "heap", "other memory"), 0.0)
    for mapped in site.server.memory_maps():
        is_file = mapped.path.startswith("/") and not mapped.path.startswith("/dev/")
        part = "libraries" if is_file else "heap" if mapped.path == "[heap]" else "other memory"
        for name in ("all", part):
            parts[name] += mapped.rss / 2**20
    return parts


async def use(site: Site, minutes: float) -> tuple[list[float], dict[str, float]]:
    """Use a server; return its memory over time, and its parts after a minute's pause."""
    end = time.monotonic() + minutes * 60
    headers = {"authorization": f"Bearer {site.token()}"}
    async with httpx2.AsyncClient(
        base_url=site.address,
        headers=headers,
        timeout=60.0,
        limits=httpx2.Limits(max_connections=None),
    ) as client:
        resident, *_ = await asyncio.gather(
            sample(site, end),
            watch_short_runs(site, client, end),
            export_long_run(client, end),
            zoom_long_run(client, end),
        )
    await asyncio.sleep(min(60.0, minutes * 6))
    return resident, measure_parts(site)


def main() -> None:
    """Compare the first third of the time with the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    options, _ = parser.parse_known_args()
    with serving(LONG_STEPS) as site:
        before = measure_parts(site)
        resident, after = asyncio.run(use(site, options.minutes))
    third = len(resident) // 3
    parts = resident[:third], resident[third : 2 * third], resident[2 * third :]
    means = [statistics.mean(part) for part in parts]
    thirds = zip(("first", "second", "last"), means, strict=True)
    ratio = means[2] / means[0]
    report(
        "soak",
        f"last ÷ first third of {options.minutes:g} minutes ≤ {BAR:g}",
        ("memory in MiB", "", *list(before)[1:]),
        [
            ("at the start", *(f"{size:.0f}" for size in before.values())),
            *((f"mean of the {name} third", f"{mean:.0f}", "", "", "") for name, mean in thirds),
            ("most", f"{max(resident):.0f}", "", "", ""),
            ("after a pause", *(f"{size:.0f}" for size in after.values())),
        ],
        measured=f"{ratio:.3f}",
        passed=ratio <= BAR,
    )


if __name__ == "__main__":
    main()
