"""What `halfstep.watch` holds a plain AMP loop up, bare and watched in turns in one process.

    python -m benchmarks.watch_cost [--save]

The loop is PyTorch's documented one: fused AdamW, GradScaler, no clip. What is ours is timed where
it is called, around each of the methods that are wrapped, so that the figure is not a difference of
two long times; the difference of whole steps, bare and watched in turns, stands beside it. Both are
means, since what is put off to every 256th step holds the loop as well. Times are the thread's own,
which other processes do not lengthen; to read that clock takes some 0.7 µs, four times a step.
Tools that are installed here log the same three numbers, loss, scale and norm, which costs them
what it costs a person: to read them.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from benchmarks.report import report
from halfstep.taps import Taps

STEPS, WARM, TURN = 6000, 300, 100
BAR_MICROSECONDS = 15.0


class Loop:
    """A small model: two layers, four parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
        self.scaler = GradScaler("cpu", init_scale=2.0**10)
        self.inputs = torch.randn(32, 64)
        self.targets = torch.randint(10, (32,))

    def step(self) -> torch.Tensor:
        """Train on one batch, and return its loss."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.net(self.inputs), self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


def turns(log: Callable[[Loop, torch.Tensor], None] | None, folder: Path) -> dict[str, Any]:
    """Return seconds of each step, bare and watched (or logged), and of what is ours in it."""
    bare, other = Loop(), Loop()
    seconds: dict[str, list[float]] = {"bare": [], "other": [], "ours": []}
    held = [0.0]
    clock = time.thread_time
    for first in range(0, STEPS, TURN):
        for _ in range(TURN):
            started = clock()
            bare.step()
            seconds["bare"].append(clock() - started)
        watch = None if log else _watched(other, folder, held)
        for _ in range(TURN):
            held[0] = 0.0
            started = clock()
            loss = other.step()
            if log:
                logging = clock()
                log(other, loss)
                held[0] = clock() - logging
            seconds["other"].append(clock() - started)
            seconds["ours"].append(held[0])
        if watch and first + TURN >= STEPS:
            watch.finish()
        elif watch:
            watch._taps.disarm()
    same = all(map(torch.equal, bare.net.parameters(), other.net.parameters()))
    return {name: each[WARM:] for name, each in seconds.items()} | {"same": same}


def _watched(loop: Loop, folder: Path, held: list[float]) -> Any:
    """Arm the taps again, with a clock around what they call."""
    watch = halfstep.watch(loop.net, folder=folder, name="watched")
    watch._taps.disarm()

    def timed(call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        started = time.thread_time()
        watch._guard(call, *arguments, **named)
        held[0] += time.thread_time() - started

    watch._taps = Taps(watch._loop, timed)
    watch._taps.arm()
    return watch


def tools(folder: Path) -> dict[str, Callable[[Loop, torch.Tensor], None]]:
    """Return how the tools that are installed here log a step."""

    def numbers(loop: Loop, loss: torch.Tensor) -> dict[str, float]:
        gradients = [p.grad for p in loop.net.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        return {"loss": loss.item(), "scale": loop.scaler.get_scale(), "norm": norm}

    found: dict[str, Callable[[Loop, torch.Tensor], None]] = {}
    if find_spec("wandb"):
        import wandb

        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        found["wandb.log, offline"] = lambda loop, loss: run.log(numbers(loop, loss))
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder)

        def add(loop: Loop, loss: torch.Tensor) -> None:
            for name, value in numbers(loop, loss).items():
                writer.add_scalar(name, value)

        found["TensorBoard"] = add
    if find_spec("mlflow"):
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.start_run()
        found["mlflow.log_metrics"] = lambda loop, loss: mlflow.log_metrics(numbers(loop, loss))
    if find_spec("trackio"):
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        trackio.init(project="cost")
        found["trackio.log"] = lambda loop, loss: trackio.log(numbers(loop, loss))
    return found


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_known_args()
    torch.set_num_threads(1)
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, log in {"halfstep.watch": None, **tools(Path(folder))}.items():
            seconds = turns(log, Path(folder))
            ours = [each * 1e6 for each in seconds["ours"]]
            bare, other = (statistics.median(seconds[kind]) * 1e6 for kind in ("bare", "other"))
            figures[name] = statistics.mean(ours)
            rows.append(
                (
                    name,
                    f"{figures[name]:.1f}",
                    f"{statistics.median(ours):.1f}",
                    f"{bare:.0f}",
                    f"{other / bare:.3f}",
                    "bit-identical" if seconds["same"] else "DIFFERENT",
                )
            )
    held = figures.pop("halfstep.watch")
    fastest = min(figures, key=figures.__getitem__, default=None)
    report(
        "watch_cost",
        f"≤ {BAR_MICROSECONDS:g} µs a step with scale, skips, loss and norm, on a CPU",
        ("tool", "µs a step, mean", "median", "bare step, µs", "step / bare", "weights"),
        rows,
        measured=f"{held:.1f} µs",
        peer=f"{fastest} {figures[fastest]:.1f} µs" if fastest else "none installed",
        passed=held <= BAR_MICROSECONDS,
    )


if __name__ == "__main__":
    main()
