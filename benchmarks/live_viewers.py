"""500 live viewers of one run, five updates a second: the server's time and memory, and who lags.

A viewer is behind by the time from a commit to the arrival of what it recorded.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field

from benchmarks import synthetic
from benchmarks.report import report
from benchmarks.site import Site, serving
from db.runs import history, runs

#: Of viewers in all, and of each person, who may have so many streams.
VIEWERS, STREAMS = 500, 100
UPDATES_A_SECOND, STEPS_AN_UPDATE, SECONDS = 5, 40, 30
BAR_CORES, BAR_SECONDS, BAR_MIB = 1.0, 1.0, 200.0
#: Of a cursor, the last step that it covers: the third number.
CURSOR = re.compile(rb"^id: (?:-?\d+\.){2}(\d+)\.", re.MULTILINE)


@dataclass
class Measured:
    """What came of it; committed: the moment at which each last step was."""

    committed: dict[int, float] = field(default_factory=dict)
    behind: list[float] = field(default_factory=list)
    latest: dict[int, int] = field(default_factory=dict)
    cores: float = 0.0
    grown_mib: float = 0.0


async def view(site: Site, token: str, cursor: str, number: int, measured: Measured) -> None:
    """Read a stream to its end, as a browser would, but for drawing."""
    host, port = site.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    writer.write(
        f"GET /api/v1/runs/1/live?after={cursor} HTTP/1.1\r\n"
        f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    tail = b""
    while piece := await reader.read(2**18):
        arrived = time.time()
        measured.latest.setdefault(number, site.steps)
        tail += piece
        for found in CURSOR.finditer(tail):
            step = int(found.group(1))
            measured.latest[number] = step
            if step in measured.committed:
                measured.behind.append(arrived - measured.committed[step])
        tail = tail[tail.rfind(b"\n") + 1 :]


async def measure(site: Site) -> Measured:
    """Let everybody watch, then record."""
    measured = Measured()
    tokens = [site.token(f"viewer-{first}") for first in range(0, VIEWERS, STREAMS)]
    with site.database.reading() as session:
        cursor = str(history.cursor_now(session, runs.get(session, 1)))
    before_mib = site.server.memory_info().rss / 2**20
    viewers = [
        asyncio.create_task(view(site, tokens[number // STREAMS], cursor, number, measured))
        for number in range(VIEWERS)
    ]
    while len(measured.latest) < VIEWERS:
        await asyncio.sleep(0.1)
    updates = synthetic.flushes(
        site.steps + SECONDS * UPDATES_A_SECOND * STEPS_AN_UPDATE,
        STEPS_AN_UPDATE,
        first=site.steps + 1,
    )
    begun, cpu = time.time(), sum(site.server.cpu_times()[:2])
    for number, update in enumerate(updates):
        await asyncio.sleep(max(begun + number / UPDATES_A_SECOND - time.time(), 0))
        await asyncio.to_thread(synthetic.record, site.database, 1, update)
        measured.committed[int(update.steps[0]["step"][-1])] = time.time()
    last = max(measured.committed)
    while min(measured.latest.values()) < last and time.time() - begun < SECONDS + 30:
        await asyncio.sleep(0.05)
    measured.cores = (sum(site.server.cpu_times()[:2]) - cpu) / (time.time() - begun)
    measured.grown_mib = site.server.memory_info().rss / 2**20 - before_mib
    for viewer in viewers:
        viewer.cancel()
    return measured


def main() -> None:
    """Run the server in a process of its own, and the viewers here."""
    with serving(10_000) as site:
        measured = asyncio.run(measure(site))
    behind = sorted(measured.behind)
    got = len(behind) / VIEWERS
    worst, p99 = behind[-1], behind[len(behind) * 99 // 100]
    last = max(measured.committed)
    reached = sum(step >= last for step in measured.latest.values())
    report(
        "live_viewers",
        f"≤ {BAR_CORES:g} core, none behind by > {BAR_SECONDS:g} s, < {BAR_MIB:g} MiB",
        (
            "viewers",
            "updates each",
            "cores of the server",
            "s behind, p99",
            "s behind, worst",
            "MiB grown",
            "viewers at the last step",
        ),
        [
            (
                VIEWERS,
                f"{got:.0f}",
                f"{measured.cores:.2f}",
                f"{p99:.2f}",
                f"{worst:.2f}",
                f"{measured.grown_mib:.0f}",
                reached,
            )
        ],
        measured=f"{measured.cores:.2f} cores, {worst:.2f} s, {measured.grown_mib:.0f} MiB",
        passed=measured.cores <= BAR_CORES
        and worst <= BAR_SECONDS
        and measured.grown_mib < BAR_MIB
        and reached == VIEWERS,
    )


if __name__ == "__main__":
    main()
