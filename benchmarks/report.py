"""Prints a table as Markdown with the machine of the measurement, and saves it on request."""

import argparse
import os
import platform
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

RESULTS = Path(__file__).parent / "results"
#: Names a file to which each claim adds its line of the one table at the end.
SUMMARY = "BENCHMARKS_SUMMARY"
#: A lent machine's clock may halve within the hour: milliseconds are to be read by this.
TURNS = 10_000_000


def report(
    claim: str,
    bar: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    measured: str,
    passed: bool,
    peer: str = "–",
) -> None:
    """Print a table. claim: the name of the benchmark's file; bar: the required result.

    measured: the figure that the bar limits. peer: the figure of the best other tool.
    """
    verdict = "pass" if passed else "MISSED"
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="keep the table in results")
    lines = [
        f"# {claim}",
        "",
        f"Bar: {bar}. Measured: {measured}. {verdict.capitalize()}.",
        "",
        table(header, rows),
        "",
        *(f"- {fact}" for fact in _circumstances(claim)),
        "",
    ]
    print("\n".join(lines))
    if path := os.environ.get(SUMMARY):
        with Path(path).open("a") as file:
            file.write(_line((claim, bar, measured, peer, verdict)) + "\n")
    if parser.parse_known_args()[0].save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{claim}.md").write_text("\n".join(lines))


def summary(lines: str) -> str:
    """Return a table of the lines that the claims added."""
    header = ("claim", "bar", "measured", "fastest peer", "")
    circumstances = "\n".join(f"- {fact}" for fact in _circumstances("all"))
    return "\n".join((_line(header), _line(["---"] * len(header)), lines, circumstances, ""))


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as Markdown."""
    return "\n".join(map(_line, (header, ["---"] * len(header), *rows)))


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _yardstick() -> float:
    begun = perf_counter()
    turns = 0
    while turns < TURNS:
        turns += 1
    return perf_counter() - begun


def _circumstances(claim: str) -> list[str]:
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":")[1].strip()
            break
    module = "benchmarks" if claim == "all" else f"benchmarks.{claim}"
    asked = [each for each in sys.argv[1:] if each != "--save"]
    named = [name for name in ("sqlalchemy", "psycopg", "numpy") if find_spec(name)]
    packages = ", ".join(f"{name} {version(name)}" for name in named)
    return [
        " ".join(("command: python -m", module, *asked)),
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, {processor}, "
        f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())}, niceness {os.nice(0)}, "
        f"{TURNS:,} turns of a loop in {_yardstick():.2f} s",
        f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}, {packages}",
    ]
