"""How long a checkpoint of 1 GiB holds the loop, and what host memory it takes.

    python -m benchmarks.checkpoint_stall [--gib 1.0]

The service's own loop trains a network whose weights and Adam moments are that large, and saves
every so many steps. The stall is measured from outside: from the step boundary, where the loop asks
what is wanted, to the next forward pass, less what that takes where nothing is saved. Beside it, in
the same process, on the same state and disk, what held the loop before: `torch.save`, then SHA-256
of the file, without even an fsync. Memory is the process's largest resident set, sampled, less that
of the same loop without a checkpoint. That steps are slower while another thread hashes and writes
is not part of the stall: it is a column of its own.
"""

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

from benchmarks.report import report
from halfstep.config import RunConfig, parse_config
from halfstep.recipe import Loss, Recipe
from halfstep.spool import Event
from trainer import checkpoint
from trainer.files import checksum
from trainer.ranks import Control
from trainer.train import train

LAYERS = 24
BYTES_A_WEIGHT = 12  # in fp32, with Adam's two moments
STEPS, EVERY_STEPS = 120, 30
BAR_STALL, BAR_MEMORY = 0.10, 1.1
SAMPLE_SECONDS = 0.005


class Wide(Recipe):
    """Square layers of one size, on random numbers; keeps when it goes forward."""

    name: ClassVar = "wide"
    title: ClassVar = "Wide"
    description: ClassVar = "For the benchmark."
    defaults: ClassVar = {"precision": "fp32", "training": {"batch_size": 2}}
    width: ClassVar = 0
    forwards: ClassVar[list[float]] = []

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        self.train_size = 64
        self.inputs = torch.randn(self.train_size, self.width)
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
        self.modules = {"model": nn.Sequential(*layers)}
        self.optimizers = {"adam": torch.optim.Adam(self.modules["model"].parameters(), fused=True)}

    def batch(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """Return inputs (B, width)."""
        return self.inputs[indices]

    def training_step(self, batch: Tensor) -> Iterator[Loss]:
        """Yield the mean square of what comes out."""
        self.forwards.append(time.perf_counter())
        yield Loss(self.modules["model"](batch).square().mean(), "adam")


class Peak(threading.Thread):
    """The largest resident set while it is open, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.size_bytes, self._over = 0, threading.Event()

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Sample until it is closed."""
        process = psutil.Process()
        while not self._over.wait(SAMPLE_SECONDS):
            self.size_bytes = max(self.size_bytes, process.memory_info().rss)


def loop(steps: int, folder: Path | None) -> tuple[list[float], list[tuple[float, Event]]]:
    """Train; return the time of each boundary, and the checkpoints with the time they were told."""
    boundaries: list[float] = []
    saves: list[tuple[float, Event]] = []
    Wide.forwards.clear()

    def control() -> Control:
        boundaries.append(time.perf_counter())
        return Control()

    def on_event(event: Event) -> None:
        if event["event"] == "checkpoint":
            saves.append((time.perf_counter(), event))

    values = {
        "training": {"steps": steps},
        "checkpoints": {"every_steps": EVERY_STEPS},
        "evaluation": {"every_steps": None},
        "diagnosis": {"replay_skips": 0},
    }
    train(
        Wide,
        parse_config(Wide, values),
        device=torch.device("cpu"),
        on_steps=lambda _steps: None,
        on_event=on_event,
        control=control,
        checkpoint_folder=folder,
    )
    return boundaries, saves


def in_line(path: Path, folder: Path) -> float:
    """Return seconds of saving a checkpoint's state and hashing the file, the better of two."""
    state = checkpoint.load(path, is_checked=True)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        torch.save(state, folder / "in_line.pt")
        checksum(folder / "in_line.pt")
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of state")
    options = parser.parse_known_args()[0]
    Wide.width = int((options.gib * 2**30 / BYTES_A_WEIGHT / LAYERS) ** 0.5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Peak() as without:
            loop(5, None)
        gc.collect()  # a network lies in cycles
        with Peak() as with_saves:
            boundaries, saves = loop(STEPS, folder)
        newest = folder / f"step-{STEPS:08d}.pt"
        size_bytes = newest.stat().st_size
        seconds_in_line = in_line(newest, folder)

    # From the boundary of step n to the forward pass of step n + 1.
    gaps = [after - at for at, after in zip(boundaries, Wide.forwards[1:], strict=False)]
    saved = {event["step"] for _told, event in saves}
    usual = statistics.median(gap for step, gap in enumerate(gaps, 1) if step not in saved)
    inner = [event["step"] for _told, event in saves if event["step"] < STEPS]
    stalls = [gaps[step - 1] - usual for step in inner]
    steps = [
        (started, ended - started) for started, ended in zip(Wide.forwards, boundaries, strict=True)
    ]
    spans = [(told - event["write_seconds"], told) for told, event in saves]
    beside = [s for at, s in steps if any(begun <= at <= told for begun, told in spans)]
    alone = [s for at, s in steps[1:] if not any(begun <= at <= told for begun, told in spans)]
    slower = statistics.median(beside) / statistics.median(alone) - 1
    share = max(stalls) / seconds_in_line
    memory = (with_saves.size_bytes - without.size_bytes) / size_bytes
    writing = statistics.median(event["write_seconds"] for _told, event in saves)
    report(
        "checkpoint_stall",
        f"≤ {BAR_STALL:.0%} of torch.save and SHA-256 in line; ≤ {BAR_MEMORY} × the state more "
        "host memory",
        (
            "state, MiB",
            "in line, s",
            "stalls, s",
            "share of the longest",
            "write, s, beside",
            "steps beside a write, slower by",
            "more memory, × state",
        ),
        [
            (
                f"{size_bytes / 2**20:.0f}",
                f"{seconds_in_line:.2f}",
                ", ".join(f"{stall:.3f}" for stall in stalls),
                f"{share:.1%}",
                f"{writing:.2f}",
                f"{slower:.0%}",
                f"{memory:.2f}",
            )
        ],
        measured=f"{share:.1%}, {memory:.2f} ×",
        passed=share <= BAR_STALL and memory <= BAR_MEMORY,
    )


if __name__ == "__main__":
    main()
