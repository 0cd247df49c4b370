"""Step times of PyTorch's AMP recipe on a GPU: every precision, loop and mode, within a budget.

    python -m benchmarks.gpu_performance                       (a CUDA device; 4 minutes at most)
    python -m benchmarks.gpu_performance --device cpu --small  (to try it out)

Each configuration has a process of its own. Those of a group start together and warm up; then they
take turns, one at a time, in five rounds of alternating direction, while all others wait for their
turn. Each group has the bare fp32 loop without TF32 among it, to which its ratios refer. The last
table is of networks whose bare step takes about 2 ms: one by its batch, which the device computes,
and one by its many small layers, which the host queues.

Processes are forked, so that this one imports torch and the product only once; it does not touch
the device.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.gpu_loops import (
    FP16,
    FP16_SCALED,
    FP32,
    LOOPS,
    MODES,
    PRECISIONS,
    Case,
    Precision,
    Size,
    pace,
    running,
)
from benchmarks.report import table

ROUNDS = 5
#: The tutorial's ratios to fp32 on its GPU: 9.405 s to 2.712 s and to 3.113 s.
BARS = {FP16: 3.47, FP16_SCALED: 3.02}
BAR_OVERHEAD = 1.03
#: Dense peaks in TFLOP/s by NVIDIA's data sheets: fp32, TF32, fp16 and bf16. The longest name that
#: fits counts.
PEAKS = {
    "V100": (15.7, None, 125.0),
    "T4": (8.1, None, 65.0),
    "A100": (19.5, 156.0, 312.0),
    "A10": (31.2, 62.5, 125.0),
    "L4": (30.3, 60.0, 121.0),
    "L40": (90.5, 90.5, 181.0),
    "H100 PCIe": (51.0, 378.0, 756.0),
    "H100": (67.0, 495.0, 989.0),
    "H200": (67.0, 495.0, 989.0),
}
WAIT_SECONDS = 600.0  # of a process for its turn, after which its parent is gone
OVER = "the time was over"
FORK = get_context("fork")


@dataclass(frozen=True)
class Settings:
    """Sizes and times of a measurement."""

    device: torch.device
    deadline: float  # by time.monotonic
    size: Size
    many_layers: Size  # small, and to be many
    warm_up_steps: int = 300  # halfstep.watch examines the first 100 steps more closely
    turn_warm_up_steps: int = 50  # in which the device's clock rises again
    turn_seconds: float = 0.25
    step_ms: float = 2.0  # of the bare loops whose overhead is measured
    start_limit: float = 75.0  # seconds in which a process starts, compiles and warms up
    turn_limit: float = 20.0  # seconds

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the deadline, or 0 after it."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True)
class Result:
    """Milliseconds per step in each round, or the reason why there are none."""

    rounds: tuple[float, ...] = ()
    left_out: str = ""

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> str:
        """Difference between the slowest and the fastest round, in percent of the median."""
        return f"{(max(self.rounds) - min(self.rounds)) / self.median:.1%}"


class Process:
    """A process that sends a function's results."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Start the process. function: is passed the connection for results, and the arguments."""
        self.started = time.monotonic()
        self.connection, end = FORK.Pipe()
        self._process = FORK.Process(target=_run, args=(function, end, *arguments), daemon=True)
        self._process.start()
        end.close()

    def result(self, timeout: float) -> Any:
        """Return the next result of the process. Raises RuntimeError if it is an error."""
        if not self.connection.poll(timeout):
            raise RuntimeError(f"no result within {timeout:.0f} s" if timeout else OVER)
        try:
            result = self.connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"ended with exit code {self._process.exitcode}") from None
        if isinstance(result, str):
            raise RuntimeError(result)
        return result

    def turn(self, timeout: float) -> float:
        """Let a loop take its turn, and return milliseconds per step. Raises RuntimeError."""
        try:
            self.connection.send(True)
        except OSError as error:
            raise RuntimeError(str(error)) from error
        return float(self.result(timeout))

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _run(function: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    """Call a function in a new process, and send its exception as a line."""
    try:
        function(connection, *arguments)
    except Exception as error:
        text = " ".join(str(error).split())
        connection.send(f"{type(error).__name__}: {text[:300]}")


def result_of(function: Callable[..., None], settings: Settings) -> Any:
    """Return the result of a function in a separate process. Raises RuntimeError."""
    process = Process(function, settings)
    try:
        return process.result(min(settings.start_limit, settings.seconds_left))
    finally:
        process.end()


def serve_turns(connection: Connection, case: Case, settings: Settings) -> None:
    """Warm a loop up, then send milliseconds per step for each requested turn."""
    device = settings.device
    with running(case, device) as step:
        pace(step, settings.warm_up_steps, device)  # libraries load, networks are compiled
        connection.send(True)
        while connection.poll(WAIT_SECONDS) and connection.recv():
            ms = pace(step, settings.turn_warm_up_steps, device)
            steps = max(10, round(settings.turn_seconds * 1e3 / ms))
            connection.send(pace(step, steps, device))


def send_sizes(connection: Connection, settings: Settings) -> None:
    """Send two sizes with a bare step of about the requested time: a batch, and many layers."""
    sizes = []
    for size, name in ((settings.size, "batch"), (settings.many_layers, "layers")):
        grown = size
        for multiple in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
            grown = replace(size, **{name: getattr(size, name) * multiple})
            with running(Case(FP16_SCALED, "bare", grown), settings.device) as step:
                pace(step, 20, settings.device)
                if pace(step, 20, settings.device) >= 0.9 * settings.step_ms:
                    break
        sizes.append(grown)
    connection.send(sizes)


def send_device(connection: Connection, settings: Settings) -> None:
    """Send the name of the device, and the CUDA version."""
    device = settings.device
    if device.type != "cuda":
        connection.send((platform.processor() or device.type, "none"))
        return
    connection.send((torch.cuda.get_device_name(device), torch.version.cuda))


def measure(cases: Sequence[Case], settings: Settings) -> dict[Case, Result]:
    """Start all loops, and let them take turns in rounds until the time is over."""
    processes, results = _start(cases, settings)
    rounds: dict[Case, list[float]] = {case: [] for case in processes}
    order = [case for case in cases if case in processes]
    for _ in range(ROUNDS):
        for case in order:
            if settings.seconds_left and case not in results:
                try:
                    seconds = min(settings.turn_limit, settings.seconds_left)
                    rounds[case].append(processes[case].turn(seconds))
                except RuntimeError as error:
                    results[case] = Result(tuple(rounds[case]), str(error))
        order.reverse()
    for case, process in processes.items():
        process.end()
        results.setdefault(case, Result(tuple(rounds[case]), OVER))
    return {case: results[case] for case in cases}


def _start(
    cases: Sequence[Case], settings: Settings
) -> tuple[dict[Case, Process], dict[Case, Result]]:
    """Start as many loops at once as there are cores; return the ready ones, and others' errors.

    Returns when no loop is starting any more, so that nothing else runs during the turns.
    """
    ready: dict[Case, Process] = {}
    failed: dict[Case, Result] = {}
    starting: dict[Case, Process] = {}
    waiting = list(cases)
    while waiting or starting:
        if not settings.seconds_left:
            failed |= {case: Result(left_out=OVER) for case in waiting}
            waiting.clear()
        while waiting and len(starting) < (os.cpu_count() or 1):
            case = waiting.pop(0)
            starting[case] = Process(serve_turns, case, settings)
        wait([each.connection for each in starting.values()], min(1.0, settings.seconds_left))
        for case, process in list(starting.items()):
            is_late = time.monotonic() - process.started > settings.start_limit
            if not (process.connection.poll() or is_late or not settings.seconds_left):
                continue
            del starting[case]
            try:
                process.result(0)
                ready[case] = process
            except RuntimeError as error:
                late = f"not ready within {settings.start_limit:.0f} s"
                failed[case] = Result(left_out=late if is_late else str(error))
                process.end()
    return ready, failed


def main() -> None:
    """Print each group's table as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    parser.add_argument("--seconds", type=float, default=220, help="budget of all groups")
    parser.add_argument("--modes", default=",".join(MODES), help="of these, comma-separated")
    options = parser.parse_known_args()[0]
    device, deadline = torch.device(options.device), time.monotonic() + options.seconds
    settings = Settings(device, deadline, Size(), Size(width=256, batch=64))
    if options.small:
        settings = Settings(
            device,
            deadline,
            Size(width=32, batch=16),
            Size(width=16, batch=16),  # another, or a busy machine's case of each would be one
            warm_up_steps=20,
            turn_warm_up_steps=5,
            turn_seconds=0.0,
            step_ms=1.0,
            start_limit=options.seconds,
            turn_limit=options.seconds,
        )
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no further processes
    with suppress(ImportError):  # the bare loop needs none of them
        for name in ("halfstep.session.watch_session", "halfstep.watching.loop", "trainer.setup"):
            import_module(name)
    modes = [mode for mode in MODES if mode in options.modes.split(",")]
    with tempfile.TemporaryDirectory(prefix="halfstep-gpu-") as tempfile.tempdir:
        has_measured = _report(modes, settings)
    print(f"{settings.seconds_left:.0f} s of {options.seconds:.0f} s were left.")
    sys.exit(not has_measured)


def _report(modes: Sequence[str], settings: Settings) -> bool:
    """Measure and print all groups; return whether the first one had its reference."""
    try:
        name, cuda = result_of(send_device, settings)
    except RuntimeError as error:
        print(f"Nothing was measured: {error}")
        return False
    size = settings.size
    print(
        f"# gpu_performance\n\n{name}, torch {torch.__version__}, CUDA {cuda}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores\n\n{size.layers} × {size.width}, "
        f"batch {size.batch}: {size.flops / 1e9:.4g} GFLOP a step, without the gradient of the "
        f"inputs. Medians of {ROUNDS} rounds, and (slowest - fastest) / median.\n",
        flush=True,
    )
    has_measured = _report_mode(modes[0], name, settings)
    _report_overhead(settings)
    for mode in modes[1:]:
        _report_mode(mode, name, settings)
    return has_measured


def _report_mode(mode: str, device_name: str, settings: Settings) -> bool:
    """Measure and print a mode's loops; return False without a reference."""
    reference = Case(FP32, "bare", settings.size)
    loops = [loop for loop in LOOPS if loop != "watched" or mode != "graph"]
    cases = [
        Case(precision, loop, settings.size, mode) for loop, precision in product(loops, PRECISIONS)
    ]
    results = measure([*dict.fromkeys([reference, *cases])], settings)
    rows: list[tuple[object, ...]] = []
    for case, result in results.items():
        begin = (case.precision.name, case.loop, case.mode)
        if not result.rounds:
            rows.append((*begin, f"not measured: {result.left_out}", *[""] * 6))
            continue
        times = (f"{result.median:.3f}", result.spread, len(result.rounds))
        ratio = results[reference].median / result.median if results[reference].rounds else None
        rate = settings.size.flops / result.median / 1e9  # TFLOP/s
        peak = peak_of(device_name, case.precision)
        share = "unknown" if peak is None else f"{rate / peak:.1%}"
        cells = (*_bar_cells(case.precision, ratio), f"{rate:.1f}", share)
        rows.append((*begin, *times, *cells))
    header = ("precision", "loop", "mode", "ms a step", "spread", "rounds")
    print(
        table((*header, "× fp32 without TF32", "bar", "TFLOP/s", "of the card's limit"), rows),
        end="\n\n",
        flush=True,
    )
    return bool(results[reference].rounds)


def _bar_cells(precision: Precision, ratio: float | None) -> tuple[str, str]:
    """Return a ratio to fp32 and its target, as texts."""
    if ratio is None:
        return "unknown", ""
    bar = BARS.get(precision)
    if bar is None:
        return f"{ratio:.2f}", ""
    return f"{ratio:.2f}", f"≥ {bar}: {'pass' if ratio >= bar else 'MISSED'}"


def _report_overhead(settings: Settings) -> None:
    """Measure and print product and watched loops, next to bare ones of about 2 ms."""
    try:
        sizes = result_of(send_sizes, settings)
    except RuntimeError as error:
        print(f"Overhead not measured: {error}\n")
        return
    settings = replace(settings, turn_seconds=2 * settings.turn_seconds)  # rows are sent in each
    kinds = [*((loop, "eager") for loop in LOOPS), ("product", "graph")]
    cases = [Case(FP16_SCALED, loop, size, mode) for size in sizes for loop, mode in kinds]
    results = measure(cases, settings)
    rows: list[tuple[object, ...]] = []
    for case, result in results.items():
        size = f"{case.size.layers} × {case.size.width}, batch {case.size.batch}"
        if not result.rounds:
            rows.append((size, case.loop, case.mode, f"not measured: {result.left_out}", *[""] * 4))
            continue
        cells = ("", "")
        bare = results[replace(case, loop="bare", mode="eager")]
        if case.loop != "bare" and bare.rounds:
            ratio = result.median / bare.median
            outcome = "pass" if ratio <= BAR_OVERHEAD else "MISSED"
            cells = (f"{ratio:.3f}", f"≤ {BAR_OVERHEAD}: {outcome}")
        times = (f"{result.median:.3f}", result.spread, len(result.rounds))
        rows.append((size, case.loop, case.mode, *times, *cells))
    header = (FP16_SCALED.name, "loop", "mode", "ms a step", "spread", "rounds", "÷ bare", "bar")
    print(table(header, rows), end="\n\n", flush=True)


def peak_of(device_name: str, precision: Precision) -> float | None:
    """Return a device's peak in a precision, in TFLOP/s, or None if unknown."""
    fits = [known for known in PEAKS if all(word in device_name for word in known.split())]
    if not fits:
        return None
    fp32, tf32, half = PEAKS[max(fits, key=len)]
    return half if precision.dtype else tf32 if precision.is_tf32 else fp32


if __name__ == "__main__":
    main()
