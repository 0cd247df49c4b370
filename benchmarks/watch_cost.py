"""Time that `halfstep.watch` adds to a step of a plain AMP loop, next to what other tools take.

    python -m benchmarks.watch_cost [--save]

The loops are PyTorch's documented ones, with fused AdamW. The time of `watch` is measured in each
wrapped function: its whole time less that of torch's original. A figure is the median of the turns'
means, so that it includes the work of every 512th step; on a busy machine the best turn says more.
The table also has the times of whole steps, bare and watched in turns. `watch` runs three of a
turn's 600 steps again in fp32, within the seconds that a run has for that: "longer by" includes
them.

Other tools log the same three numbers: loss, scale and norm. Their time includes reading the
numbers. They have their own environment below .bench-env.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

import halfstep
from benchmarks.peers import PEERS, pin, python_with
from benchmarks.report import report

TURN, ROUNDS = 600, 3  # steps, of which one or two hand over what the others left
BAR_MICROSECONDS, BAR_WANDB, BAR_TRACKIO = 45.0, 1 / 20, 0.4
OUR_WHEEL = str(Path(halfstep.__file__).parent)
TOOLS = ("wandb", "tensorboard", "mlflow", "trackio")
OURS = "halfstep.watch"
BARS = (OURS, "wandb", "trackio")  # the tools with a target; others are measured in the first loop
KINDS = ("scaler", "no scaler", "clip", "100 parameters", "two optimizers", "accumulation")
clock = time.perf_counter


class Loop:
    """A small model, by default with two layers and four parameters."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        if kind == "100 parameters":
            layers = [layer for _ in range(49) for layer in (nn.Linear(8, 8), nn.Tanh())]
            self.net = nn.Sequential(nn.Linear(64, 8), *layers, nn.Linear(8, 10))
        else:
            self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
        first, *rest = self.net
        parts = [first, nn.Sequential(*rest)] if kind == "two optimizers" else [self.net]
        self.optimizers = [torch.optim.AdamW(part.parameters(), fused=True) for part in parts]
        is_scaled = kind != "no scaler"
        self.scaler = GradScaler("cpu", init_scale=2.0**10, enabled=is_scaled)
        self.inputs, self.targets = torch.randn(32, 64), torch.randint(10, (32,))

    def step(self) -> torch.Tensor:
        """Train on one batch or four; return the last loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(4 if self.kind == "accumulation" else 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(self.net(self.inputs), self.targets)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            if self.kind == "clip":
                self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss


class Clocks:
    """Time spent in functions, without that of the original ones inside them."""

    #: Owner and name of each function that is wrapped in a step.
    WRAPPED = (
        *((GradScaler, name) for name in ("scale", "unscale_", "_check_inf_per_device")),
        *((GradScaler, name) for name in ("step", "update")),
        *((clip_grad, "_get_total_norm"), (clip_grad, "_clip_grads_with_norm_")),
        *((clip_grad, "_group_tensors_by_device_and_dtype"),),
        (torch.autograd, "_engine_run_backward"),
    )

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before = [(owner, name, vars(owner)[name]) for owner, name in self.WRAPPED]

    def wrap(self, sign: float) -> None:
        """Add (1) or subtract (-1) the current time of each function."""
        for owner, name in self.WRAPPED:
            setattr(owner, name, self.add_clock(vars(owner)[name], sign))

    def add_clock(self, function: Any, sign: float) -> Any:
        """Return a wrapped function whose time is added."""

        @wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            started = clock()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += sign * (clock() - started)

        return wrapper

    def end(self) -> None:
        """Restore the original functions."""
        for owner, name, function in self._before:
            setattr(owner, name, function)


def time_watched(loop: Loop, folder: Path) -> tuple[list[float], float]:
    """Return each step's whole seconds in a turn, and the mean seconds of our code."""
    clocks = Clocks()
    clocks.wrap(-1)
    watch = halfstep.watch(loop.net, folder=folder, name="watched")
    assert watch._run is not None
    for handle in watch._run.taps._hooks:  # the optimizers' hooks have no original
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = clocks.add_clock(hooks[handle.id], 1)
    clocks.wrap(1)
    for _ in range(150):  # a loop's first steps are examined more closely
        loop.step()
    clocks.seconds = 0.0
    whole = turn(loop.step)
    ours = clocks.seconds / len(whole)
    clocks.end()
    watch.finish()
    return whole, ours


def bare_turn(loop: Loop) -> tuple[list[float], float]:
    """Return the same for a bare loop, where ours is torch's own time for the norms of a clip.

    While a loop is watched, its clip keeps the norms that it computes: torch's work is in our time.
    """
    clocks = Clocks()
    vars(clip_grad)["_get_total_norm"] = clocks.add_clock(vars(clip_grad)["_get_total_norm"], 1)
    whole = turn(loop.step)
    clocks.end()
    return whole, clocks.seconds / len(whole)


def turn(step: Callable[[], object]) -> list[float]:
    """Return the seconds of a turn's steps."""
    seconds = []
    for _ in range(TURN):
        started = clock()
        step()
        seconds.append(clock() - started)
    return seconds


def time_logged(loop: Loop, log: Callable[[Loop, torch.Tensor], None]) -> tuple[list[float], float]:
    """Return the same for another tool."""
    whole, held = [], 0.0
    for _ in range(TURN):
        started = clock()
        loss = loop.step()
        logging = clock()
        log(loop, loss)
        ended = clock()
        whole.append(ended - started)
        held += ended - logging
    return whole, held / TURN


def turns(kind: str, log: Callable[[Loop, torch.Tensor], None] | None, folder: Path) -> Any:
    """Return mean seconds per step of each turn, bare and watched (or logged), and of our code."""
    bare, other = Loop(kind), Loop(kind)
    result: dict[str, list[float]] = {"bare": [], "other": [], "ours": []}
    for number in range(ROUNDS):
        steps, own = bare_turn(bare)
        if log is None:
            whole, ours = time_watched(other, folder / f"{kind}-{number}")
            ours -= own
        else:
            whole, ours = time_logged(other, log)
        result["bare"].append(statistics.mean(steps))
        result["other"].append(statistics.mean(whole))
        result["ours"].append(ours)
    pairs = zip(bare.net.parameters(), other.net.parameters(), strict=True)
    for _ in range(150 * ROUNDS if log is None else 0):  # as many as the other
        bare.step()
    return result | {"same": all(torch.equal(a, b) for a, b in pairs)}


def tools(folder: Path) -> dict[str, Callable[[Loop, torch.Tensor], None]]:
    """Return how installed tools log a step; W&B is offline, with its watch."""

    def numbers(loop: Loop, loss: torch.Tensor) -> dict[str, float]:
        gradients = [p.grad for p in loop.net.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        return {"loss": loss.item(), "scale": loop.scaler.get_scale(), "norm": norm}

    found: dict[str, Callable[[Loop, torch.Tensor], None]] = {}
    if find_spec("wandb"):
        import wandb

        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))

        def log(loop: Loop, loss: torch.Tensor) -> None:
            if not run.step:
                run.watch(loop.net)
            run.log(numbers(loop, loss))

        found["wandb"] = log
    if find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder)

        def add(loop: Loop, loss: torch.Tensor) -> None:
            for name, value in numbers(loop, loss).items():
                writer.add_scalar(name, value)

        found["tensorboard"] = add
    if find_spec("mlflow"):
        import mlflow

        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.start_run()
        found["mlflow"] = lambda loop, loss: mlflow.log_metrics(numbers(loop, loss))
    if find_spec("trackio"):
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        trackio.init(project="cost", embed=False)
        found["trackio"] = lambda loop, loss: trackio.log(numbers(loop, loss))
    return found


def python() -> str:
    """Return the Python of the tools' environment, or this one."""
    torch_pin = f"torch=={torch.__version__.partition('+')[0]}"
    made = python_with("watch", torch_pin, "--editable", OUR_WHEEL, *map(pin, TOOLS))
    return str(made or sys.executable)


def compare(folder: Path) -> None:
    """Run each installed tool in turns, and print step times as JSON."""
    torch.set_num_threads(1)
    os.environ["HALFSTEP_MODE"] = "offline"
    logs: dict[str, Callable[[Loop, torch.Tensor], None] | None] = {OURS: None, **tools(folder)}
    chosen = [kind for kind in KINDS if kind in os.environ.get("KINDS", ",".join(KINDS)).split(",")]
    taken = {
        kind: {
            name: turns(kind, log, folder / "runs")
            for name, log in logs.items()
            if kind == KINDS[0] or name in BARS
        }
        for kind in chosen
    }
    print(json.dumps(taken), flush=True)


def main() -> None:
    """Print the table from the tools' own environment."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, help="print figures, of the tools here")
    if into := parser.parse_known_args()[0].into:
        compare(into)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [python(), "-m", "benchmarks.watch_cost", "--into", folder]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    [figures_line] = [line for line in printed.splitlines() if line.startswith('{"')]
    rows: list[tuple[object, ...]] = []
    passes, worst = [], 0.0
    for kind, tools_taken in json.loads(figures_line).items():
        figures: dict[str, float] = {}
        for name, taken in tools_taken.items():
            weights = "bit-identical" if taken.pop("same") else "DIFFERENT"
            held = {part: statistics.median(each) * 1e6 for part, each in taken.items()}
            figures[name] = held["ours"]
            added, best = held["other"] - held["bare"], min(taken["ours"]) * 1e6
            times = f"{held['ours']:.1f}", f"{best:.1f}", f"{held['bare']:.0f}", f"{added:.0f}"
            rows.append((kind, f"{name} {PEERS.get(name, '')}".strip(), *times, weights))
        ours, trackio = figures[OURS], figures.get("trackio")
        wandb = figures.get("wandb")
        worst = max(worst, ours)
        passes.append(
            ours <= BAR_MICROSECONDS
            and trackio is not None
            and wandb is not None
            and ours <= min(BAR_TRACKIO * trackio, BAR_WANDB * wandb)
        )
    report(
        "watch_cost",
        f"≤ {BAR_MICROSECONDS:g} µs a step on a CPU, ≤ {BAR_TRACKIO} × Trackio, "
        f"≤ 1/{1 / BAR_WANDB:.0f} × wandb",
        ("loop", "tool", "µs a step", "best turn", "bare step, µs", "longer by, µs", "weights"),
        rows,
        measured=f"at most {worst:.1f} µs; {sum(passes)} of {len(passes)} loops pass",
        peer="Trackio and wandb, in the rows",
        passed=all(passes),
    )


if __name__ == "__main__":
    main()
