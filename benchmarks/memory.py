"""Measure the memory of the recording process and of the server while a watched run grows.

The recorder takes 10,000,000 steps. The server follows 1,000,000 for a viewer who receives each
of them. It also exports that many steps as CSV and as Parquet, and discards the output.
"""

import re
import socket
import statistics
from collections.abc import Callable, Iterator

import psutil

from benchmarks import databases, synthetic
from benchmarks.report import report
from benchmarks.site import Site, serving
from db.database import Database
from db.telemetry.export import as_csv, as_parquet

WATCHED_STEPS = 1_000_000
BAR = 1.1
#: The third number of a cursor is the last step that it covers.
CURSOR = re.compile(rb"^id: (?:-?\d+\.){2}(\d+)\.", re.MULTILINE)


def exporting(export: Callable[[Database, int, str], Iterator[bytes]]) -> list[float]:
    """Export a long run; return the MiB after each piece."""
    process = psutil.Process()
    return [_resident_mib(process) for _piece in export(synthetic.long_run(), 1, "steps")]


def recording() -> list[float]:
    """Record a long run; return the MiB after each flush."""
    with databases.sqlite() as database:
        run_id = synthetic.start_run(database)
        resident = []
        for flush in synthetic.flushes(synthetic.LONG_STEPS):
            synthetic.record(database, run_id, flush)
            resident.append(_resident_mib(psutil.Process()))
    return resident


def watching() -> list[float]:
    """Let a viewer follow a run flush by flush; return the server's memory after each one."""
    with serving(synthetic.BATCH_STEPS) as site, _stream(site) as stream:
        resident = []
        for flush in synthetic.flushes(WATCHED_STEPS, first=site.steps + 1):
            synthetic.record(site.database, 1, flush)
            _read_until(stream, int(flush.steps[0]["step"][-1]))
            resident.append(_resident_mib(site.server))
    return resident


def _stream(site: Site) -> socket.socket:
    host, port = site.address.removeprefix("http://").split(":")
    stream = socket.create_connection((host, int(port)))
    stream.sendall(
        f"GET /api/v1/runs/1/live HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {site.token()}\r\n\r\n".encode()
    )
    return stream


def _read_until(stream: socket.socket, step: int) -> None:
    tail, seen = b"", 0
    while seen < step:
        tail += stream.recv(2**18)
        seen = max([seen, *(int(found.group(1)) for found in CURSOR.finditer(tail))])
        tail = tail[tail.rfind(b"\n") + 1 :]


def _resident_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 2**20)


def main() -> None:
    """Compare the first tenth of each memory curve with its last."""
    rows, ratios = [], []
    for name, resident in (
        ("recorder", recording()),
        ("server, watched", watching()),
        ("export, CSV", exporting(as_csv)),
        ("export, Parquet", exporting(as_parquet)),
    ):
        tenth = len(resident) // 10
        first, last = (statistics.mean(part) for part in (resident[:tenth], resident[-tenth:]))
        ratios.append(last / first)
        rows.append(
            (name, f"{first:.1f}", f"{last:.1f}", f"{ratios[-1]:.3f}", f"{max(resident):.1f}")
        )
    report(
        "memory",
        f"last ÷ first tenth ≤ {BAR:g}",
        ("process", "first tenth, MiB", "last tenth, MiB", "ratio", "most, MiB"),
        rows,
        measured=f"recorder {ratios[0]:.3f}, server {ratios[1]:.3f}, export {max(ratios[2:]):.3f}",
        passed=max(ratios) <= BAR,
    )


if __name__ == "__main__":
    main()
