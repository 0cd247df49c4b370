"""Ten million printed lines: memory of script and sidecar, lines in the log, time unwatched.

    python -m benchmarks.console_lines [LINES] [--save]

A script prints lines into a file, bare and watched in turns. The resident memory of script and
sidecar is sampled ten times a second. Afterwards the log is read back and compared, line by line.

A second script is a loop whose steps take a millisecond and print a line each, as trainings do. Its
figure is how much longer a line takes when watched, as a share of a step.
"""

import gzip
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil

from benchmarks.report import report

LINES = int(next((each for each in sys.argv[1:] if each.isdecimal()), 10_000_000))
TURNS = 2
STEPS, STEP_TURNS = 5000, 5
BAR_MEMORY, BAR_SHARE = 1.1, 0.01
SCRIPT = """
import sys
import time

if sys.argv[2] == "watched":
    import halfstep

    halfstep.watch(mode="offline", folder=sys.argv[3])
begun, used = time.perf_counter(), time.process_time()
for number in range(int(sys.argv[1])):
    print(f"step {number}: loss {1 / (number + 1):.6f}, {number * 64:,} samples")
sys.stdout.flush()
print(time.perf_counter() - begun, time.process_time() - used, file=sys.stderr)
"""
STEPPING = """
import sys
import time

if sys.argv[2] == "watched":
    import halfstep

    halfstep.watch(mode="offline", folder=sys.argv[3])
printing, begun = 0.0, time.perf_counter()
for number in range(int(sys.argv[1])):
    until = time.perf_counter() + 0.001
    while time.perf_counter() < until:
        pass
    started = time.perf_counter()
    print(f"step {number}: loss {1 / (number + 1):.6f}, {number * 64:,} samples", flush=True)
    printing += time.perf_counter() - started
print(printing, time.perf_counter() - begun, file=sys.stderr)
"""


def line(number: int) -> str:
    """Return the script's line for a number."""
    return f"step {number}: loss {1 / (number + 1):.6f}, {number * 64:,} samples"


class Turn:
    """One run of the script, until its sidecar has ended."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.script: list[float] = []  # MiB, as all samples
        self.sidecar: list[float] = []
        begun = time.perf_counter()
        with (folder / "printed.txt").open("wb") as printed, (folder / "times").open("wb") as times:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(LINES), kind, str(folder)],
                stdout=printed,
                stderr=times,
            )
            while process.poll() is None:
                if (folder / "printed.txt").stat().st_size:
                    self._sample(process.pid, folder)
                time.sleep(0.1)
        self.seconds = time.perf_counter() - begun
        while sidecars := _sidecars(folder):
            self.sidecar += map(_resident_mib, sidecars)
            time.sleep(0.1)
        self.all_seconds = time.perf_counter() - begun
        last = (folder / "times").read_text().splitlines()[-1]
        self.printing_seconds, self.cpu_seconds = map(float, last.split())
        with (folder / "printed.txt").open() as file:
            self.copied = _equal_lines(each.rstrip("\n") for each in file)
        self.logged = _equal_lines(_read_logged(folder)) if kind == "watched" else 0

    def _sample(self, pid: int, folder: Path) -> None:
        try:
            self.script.append(_resident_mib(psutil.Process(pid)))
        except psutil.NoSuchProcess:
            return
        self.sidecar += map(_resident_mib, _sidecars(folder))


def _sidecars(folder: Path) -> list[psutil.Process]:
    sidecars = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "halfstep.sidecar.process" in words and str(folder) in words[-1]:
            sidecars.append(process)
    return sidecars


def _resident_mib(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss / 2**20)
    except psutil.NoSuchProcess:
        return 0.0


def _read_logged(folder: Path) -> Iterator[str]:
    for part in sorted(folder.glob("*/log/*.txt.gz")):
        with gzip.open(part, "rt") as file:
            for each in file:
                yield each.rstrip("\n")


def _equal_lines(lines: Iterator[str]) -> int:
    """Return how many lines are in order and as printed."""
    numbers = count()
    expected = next(numbers)
    for each in lines:
        if each == line(expected):
            expected = next(numbers)
    return expected


def _drift(samples: list[float]) -> tuple[float, float, float]:
    """Return the means of the second and the last tenth of the samples, and their ratio."""
    tenth = max(len(samples) // 10, 1)
    first = statistics.mean(samples[tenth : 2 * tenth] or samples)
    last = statistics.mean([each for each in samples[-tenth:] if each] or samples)
    return first, last, last / first


def line_seconds(kind: str) -> tuple[float, float]:
    """Return the mean seconds of a step's line, and of a whole step."""
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder,
        tempfile.TemporaryFile() as printed,
    ):
        done = subprocess.run(
            [sys.executable, "-c", STEPPING, str(STEPS), kind, folder],
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        while _sidecars(Path(folder)):
            time.sleep(0.1)
    printing, whole = map(float, done.stderr.splitlines()[-1].split())
    return printing / STEPS, whole / STEPS


def line_of_a_step() -> dict[str, tuple[float, float]]:
    """Return the median seconds of a line and of a step, bare and watched in turns."""
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "watched": []}
    for _ in range(STEP_TURNS):
        for kind, seconds in found.items():
            seconds.append(line_seconds(kind))
    return {
        kind: (statistics.median(each for each, _ in both), statistics.median(e for _, e in both))
        for kind, both in found.items()
    }


def main() -> None:
    """Run the script bare and watched in turns, and print the memory of the last watched run."""
    turns: dict[str, list[Turn]] = {"bare": [], "watched": []}
    for _ in range(TURNS):
        for kind, done in turns.items():
            with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
                done.append(Turn(kind, Path(folder)))
    watched = turns["watched"][-1]
    rows = []
    for name, samples in (("script", watched.script), ("sidecar", watched.sidecar)):
        first, last, ratio = _drift(samples)
        cells = (f"{first:.1f}", f"{last:.1f}", f"{ratio:.3f}", f"{max(samples):.1f}")
        rows.append((f"memory of the {name}, MiB", *cells))
    figures: dict[str, dict[str, float]] = {}
    for kind, done in turns.items():
        figures[kind] = {
            name: statistics.median(getattr(each, name) for each in done)
            for name in ("printing_seconds", "cpu_seconds", "all_seconds")
        }
    added = {name: figures["watched"][name] - figures["bare"][name] for name in figures["bare"]}
    nanoseconds = added["printing_seconds"] / LINES * 1e9
    for name, seconds in added.items():
        text = name.replace("_", " ")
        rows.append(
            (
                f"{text}, bare, watched, longer by",
                f"{figures['bare'][name]:.2f}",
                f"{figures['watched'][name]:.2f}",
                f"{seconds:.2f}",
                "",
            )
        )
    steps = line_of_a_step()
    (bare_line, bare_step), (watched_line, _) = steps["bare"], steps["watched"]
    share = (watched_line - bare_line) / bare_step
    for name, at in (("a line", 0), ("a step", 1)):
        bare, with_watch = steps["bare"][at] * 1e6, steps["watched"][at] * 1e6
        cells = (f"{bare:.1f}", f"{with_watch:.1f}", f"{with_watch - bare:.1f}", "")
        rows.append((f"µs of {name} of a loop, bare, watched, longer by", *cells))
    logged = min(each.logged for each in turns["watched"])
    copied = min(each.copied for done in turns.values() for each in done)
    rows.append(("lines in the log, in the output", f"{logged:,}", f"{copied:,}", "", ""))
    drifts = [_drift(samples)[2] for samples in (watched.script, watched.sidecar)]
    report(
        "console_lines",
        f"all {LINES:,} lines in the log, memory last ÷ second tenth ≤ {BAR_MEMORY:g}, "
        f"a line's share of a step of 1 ms ≤ {BAR_SHARE:.0%}",
        ("", "first", "second", "ratio or difference", "most"),
        rows,
        measured=f"{logged:,} lines, memory {max(drifts):.3f}, {nanoseconds:.0f} ns a "
        f"line longer without a pause, {share:.2%} of a step",
        passed=logged == copied == LINES and max(drifts) <= BAR_MEMORY and share <= BAR_SHARE,
    )


if __name__ == "__main__":
    main()
