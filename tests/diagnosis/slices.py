"""Runs the corpus' tests in slices of limited time, and prints what passed, failed and did not run.

    python -m tests.diagnosis.slices                   (all of eight slices)
    python -m tests.diagnosis.slices --slice 3/8       (the third)

All tests of a loop are in one slice. HALFSTEP_DIAGNOSIS and HALFSTEP_DIAGNOSIS_DEVICE apply, see
tests.diagnosis.corpus. A slice that exceeds its time is killed, and its other tests did not run.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

import pytest

VARIABLE = "HALFSTEP_DIAGNOSIS_SLICE"
SLICES, SECONDS = 8, 110.0
MOST_PROCESSES = 8  # they share a device
TESTS = ("tests/diagnosis/test_corpus.py", "tests/diagnosis/test_findings.py")
ERROR_CHARACTERS, LOG_CHARACTERS = 1500, 3000
PROCESSES = get_context("spawn")


def numbers(part: str) -> tuple[int, int]:
    """Return number and count of a slice such as 3/8."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"slice = {part!r}: must be k/N with 1 <= k <= N, e.g. 3/8")
    return number, count


def has_place(part: str, place: int) -> bool:
    """Return whether a loop with this index is in a slice."""
    number, count = numbers(part)
    return place % count == number - 1


@dataclass
class Slice:
    """Outcomes of a slice's tests, by id."""

    tests: set[str] = field(default_factory=set)
    outcomes: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None  # None: it was killed
    seconds: float = 0.0

    @property
    def row(self) -> str:
        """Return the outcomes of the tests as a table row."""
        counts = Counter(self.outcomes.values())
        cells = [len(self.tests), *(counts[each] for each in ("passed", "failed", "skipped"))]
        cells.append(len(self.tests - self.outcomes.keys()))
        end = "over time" if self.exit_code is None else f"exit code {self.exit_code}"
        return " | ".join((*map(str, cells), f"{self.seconds:.0f} s", end))

    @property
    def has_passed(self) -> bool:
        """Whether all tests ran, and none failed."""
        return self.exit_code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class Outcomes:
    """A plugin that sends a session's tests and their outcomes."""

    def __init__(self, connection: Connection) -> None:
        self._send = connection.send

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._send([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._send(list(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = report.longreprtext[-ERROR_CHARACTERS:] if report.failed else ""
            self._send((report.nodeid, report.outcome, text))


def run(arguments: Sequence[str], seconds: float) -> Slice:
    """Run pytest in its own process with a timeout; print each failure as it occurs."""
    result, started = Slice(), monotonic()
    connection, end = PROCESSES.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = PROCESSES.Process(target=_run_pytest, args=(end, log, list(arguments)))
        process.start()
        end.close()
        with suppress(EOFError):
            while connection.poll(max(0.0, started + seconds - monotonic())):
                _take(result, connection.recv())
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode is not None and process.exitcode >= 0:
            result.exit_code = process.exitcode
        if result.exit_code not in (None, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            print(log.read_text(errors="replace")[-LOG_CHARACTERS:])
    result.seconds = monotonic() - started
    return result


def _run_pytest(connection: Connection, log: Path, arguments: list[str]) -> None:
    os.setsid()  # so that its processes are killed with it
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(pytest.main(arguments, plugins=[Outcomes(connection)]))


def _take(result: Slice, message: list[str] | tuple[str, str, str]) -> None:
    if isinstance(message, list):
        result.tests.update(message)
        return
    test, outcome, text = message
    if result.outcomes.get(test) != "failed":  # the end of a failed test may pass
        result.outcomes[test] = outcome
    if text:
        print(f"\nFAILED {test}\n{text}", flush=True)


def main() -> None:
    """Run one slice or all, and continue after a failed one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slice", help=f"k/N; by default 1/{SLICES} to {SLICES}/{SLICES}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of each slice")
    options = parser.parse_args()
    every = [f"{number}/{SLICES}" for number in range(1, SLICES + 1)]
    parts = [options.slice] if options.slice else every
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    parallel = (
        ["--numprocesses", str(processes), "--dist", "loadgroup"] if find_spec("xdist") else []
    )
    arguments = [*TESTS, "-W", "default", "-p", "no:cacheprovider", *parallel]
    print("| slice | tests | passed | failed | skipped | not run | time | end |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    has_passed = True
    for part in parts:
        numbers(part)
        os.environ[VARIABLE] = part
        result = run(arguments, options.seconds)
        print(f"| {part} | {result.row} |", flush=True)
        has_passed = has_passed and result.has_passed
    sys.exit(not has_passed)


if __name__ == "__main__":
    main()
