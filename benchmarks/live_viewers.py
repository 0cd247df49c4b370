"""Live viewers: the server's CPU time and memory, and the viewers' lag.

There are two cases: 500 viewers of one run that is recorded five times a second, and 100 viewers,
each with a run of its own that is recorded once a second. A viewer's lag is the time from a commit
to the arrival of its data.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2

from benchmarks import synthetic
from benchmarks.report import report
from benchmarks.site import Site, serving
from db.queue import queue
from db.runs import history, runs

#: Open streams that one person may have.
STREAMS = 100
STEPS_AN_UPDATE, SECONDS = 40, 30
FIRST_STEPS = 10_000
BAR_CORES, BAR_SECONDS, BAR_MIB = 1.0, 1.0, 200.0
#: The third number of a cursor is the last step that it covers.
CURSOR = re.compile(rb"^id: (?:-?\d+\.){2}(\d+)\.", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """Viewers that are spread evenly over runs."""

    runs: int
    viewers: int
    updates_a_second: int  # of each run


CASES = (Case(1, 500, 5), Case(100, 100, 1))


@dataclass
class Measured:
    """The figures of a case."""

    #: When each last step of an update was committed, by run and step.
    committed: dict[tuple[int, int], float] = field(default_factory=dict)
    behind: list[float] = field(default_factory=list)
    latest: dict[int, int] = field(default_factory=dict)  # step that each viewer has reached
    cores: float = 0.0
    grown_mib: float = 0.0
    reached: int = 0  # viewers that got the last step


async def view(
    site: Site, token: str, run_id: int, cursor: str, number: int, measured: Measured
) -> None:
    """Read a stream to its end like a browser, without drawing."""
    host, port = site.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    writer.write(
        f"GET /api/v1/runs/{run_id}/live?after={cursor} HTTP/1.1\r\n"
        f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    tail = b""
    while piece := await reader.read(2**18):
        arrived = time.time()
        measured.latest.setdefault(number, 0)
        tail += piece
        for found in CURSOR.finditer(tail):
            step = int(found.group(1))
            measured.latest[number] = step
            if (run_id, step) in measured.committed:
                measured.behind.append(arrived - measured.committed[run_id, step])
        tail = tail[tail.rfind(b"\n") + 1 :]


async def measure(site: Site, case: Case, run_ids: Sequence[int], first: int) -> Measured:
    """Let all viewers follow, then record each run from step `first` on."""
    measured = Measured()
    tokens = [site.token(f"viewer-{number}") for number in range(0, case.viewers, STREAMS)]
    for token in tokens:  # until its first use a token counts for its address
        answer = httpx2.get(
            f"{site.address}/api/v1/runs", headers={"Authorization": f"Bearer {token}"}
        )
        answer.raise_for_status()
    with site.database.reading() as session:
        cursors = {
            each: str(history.cursor_now(session, runs.get(session, each))) for each in run_ids
        }
    before_mib = site.server.memory_info().rss / 2**20
    watched = [run_ids[number % len(run_ids)] for number in range(case.viewers)]
    viewers = [
        asyncio.create_task(
            view(site, tokens[number // STREAMS], run_id, cursors[run_id], number, measured)
        )
        for number, run_id in enumerate(watched)
    ]
    while len(measured.latest) < case.viewers:
        await asyncio.sleep(0.1)
    updates = list(
        synthetic.flushes(
            first + SECONDS * case.updates_a_second * STEPS_AN_UPDATE - 1,
            STEPS_AN_UPDATE,
            first=first,
        )
    )
    pace = case.updates_a_second * len(run_ids)
    begun, cpu = time.time(), sum(site.server.cpu_times()[:2])
    for number in range(len(updates) * len(run_ids)):
        update, run_id = updates[number // len(run_ids)], run_ids[number % len(run_ids)]
        await asyncio.sleep(max(begun + number / pace - time.time(), 0))
        await asyncio.to_thread(synthetic.record, site.database, run_id, update)
        measured.committed[run_id, int(update.steps[0]["step"][-1])] = time.time()
    last = int(updates[-1].steps[0]["step"][-1])
    while min(measured.latest.values()) < last and time.time() - begun < 2 * SECONDS:
        await asyncio.sleep(0.05)
    measured.cores = (sum(site.server.cpu_times()[:2]) - cpu) / (time.time() - begun)
    measured.grown_mib = site.server.memory_info().rss / 2**20 - before_mib
    measured.reached = sum(step >= last for step in measured.latest.values())
    for viewer in viewers:
        viewer.cancel()
    return measured


def measure_case(case: Case) -> Measured:
    """Run the server in a separate process, with the viewers in this one."""
    with serving(FIRST_STEPS) as site:
        if case.runs == 1:
            return asyncio.run(measure(site, case, [1], FIRST_STEPS + 1))
        run_ids = [synthetic.start_run(site.database) for _ in range(case.runs)]
        with site.database.writing() as session:
            for run_id in run_ids:
                queue.start(session, run_id, 1)
        return asyncio.run(measure(site, case, run_ids, 1))


def main() -> None:
    """Measure all cases, and print the table."""
    cases = {case: measure_case(case) for case in CASES}
    rows = []
    for case, measured in cases.items():
        behind = sorted(measured.behind)
        rows.append(
            (
                case.runs,
                case.viewers,
                f"{len(behind) / case.viewers:.0f}",
                f"{measured.cores:.2f}",
                f"{behind[len(behind) * 99 // 100]:.2f}",
                f"{behind[-1]:.2f}",
                f"{measured.grown_mib:.0f}",
                measured.reached,
            )
        )
    cores = max(each.cores for each in cases.values())
    worst = max(max(each.behind) for each in cases.values())
    grown = max(each.grown_mib for each in cases.values())
    report(
        "live_viewers",
        f"≤ {BAR_CORES:g} core, none behind by > {BAR_SECONDS:g} s, < {BAR_MIB:g} MiB",
        (
            "runs",
            "viewers",
            "updates each",
            "cores of the server",
            "s behind, p99",
            "s behind, worst",
            "MiB grown",
            "viewers at the last step",
        ),
        rows,
        measured=f"{cores:.2f} cores, {worst:.2f} s, {grown:.0f} MiB",
        passed=cores <= BAR_CORES
        and worst <= BAR_SECONDS
        and grown < BAR_MIB
        and all(each.reached == case.viewers for case, each in cases.items()),
    )


if __name__ == "__main__":
    main()
