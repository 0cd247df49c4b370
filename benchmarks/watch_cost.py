"""What `halfstep.watch` holds a plain AMP loop up, bare and watched in turns in one process.

    python -m benchmarks.watch_cost [--save]

The loop is PyTorch's documented one: fused AdamW, GradScaler, no clip. What is ours is timed where
it is called, around each of the methods that are wrapped, so that the figure is not a difference of
two long times; the difference of whole steps, bare and watched in turns, stands beside it. A figure
is the median of the turns' means: means, since what is put off to every 512th step holds the loop
as well; on a busy machine the best turn says more. Below stand the parts that nothing here can do
without: the one torch call without which no tool has a norm, alone, and the calls themselves from
the methods that are wrapped, made of a listener that does nothing.

Other tools log the same three numbers, loss, scale and norm, which costs them what it costs a
person: to read them. They lie in an environment of their own below .bench-env, made the first time;
which of them are not to be had is said.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from benchmarks.report import report
from halfstep.monitor.hooks import UNGUARDED, USUAL, Hooks, Listener
from halfstep.monitor.usual_steps import UsualSteps

TURN, ROUNDS = 600, 5  # steps, of which one or two hand over what the others left
BAR_MICROSECONDS, BAR_RATIO = 15.0, 1 / 20
OUR_WHEEL = str(Path(halfstep.__file__).parent)
ENVIRONMENT = Path(__file__).parents[1] / ".bench-env" / "watch"
TOOLS = {"wandb": "0.31.0", "tensorboard": "2.21.0", "mlflow": "3.17.2", "trackio": "0.43.0"}
OURS = "halfstep.watch"


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
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


def turns(log: Callable[[Loop, torch.Tensor], None] | None, folder: Path) -> dict[str, Any]:
    """Return a turn's mean seconds a step, bare and watched (or logged), and of what is ours in it.

    norm: of the kernels alone, after each bare step.  calls: of those to a listener that does
    nothing.
    """
    bare, other, noop_watch = Loop(), Loop(), Loop()
    kinds = ("bare", "norm", "other", "ours", "calls")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    held = [0.0]
    clock = time.perf_counter
    for number in range(1, ROUNDS + 1):
        for _ in range(TURN):
            started = clock()
            bare.step()
            seconds["bare"].append(clock() - started)
            gradients = [p.grad for p in bare.net.parameters() if p.grad is not None]
            started = clock()
            torch._foreach_norm(gradients)
            seconds["norm"].append(clock() - started)
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
        if watch:
            watch._taps.disarm()
            hooks = _armed(_clocked(NoopWatch(), held), watch._taps._guard)
            for _ in range(TURN):
                held[0] = 0.0
                noop_watch.step()
                seconds["calls"].append(held[0])
            hooks.disarm()
        if watch and number == ROUNDS:
            watch.finish()
    same = all(map(torch.equal, bare.net.parameters(), other.net.parameters()))
    turned = {
        name: [statistics.mean(each[i : i + TURN]) for i in range(TURN, len(each), TURN)]
        for name, each in seconds.items()
        if each
    }
    return turned | {"same": same}


class NoopSteps(UsualSteps):
    """Accepts each call of a usual step, and does nothing."""

    def recorded(self, *_: Any, **__: Any) -> bool:
        """Return True, as all the others: nothing else is called."""
        return True

    scaled = begins = checked = unscaled = updating = updated = recorded


class NoopWatch:
    """Listens as a watched loop does, and does nothing."""

    def __init__(self) -> None:
        self.closed_steps = 0
        self.usual = NoopSteps(self, 0)
        self.stepping: list[torch.optim.Optimizer] = []
        self.scaler_steps = 0

    def optimizer_ends(self, _optimizer: torch.optim.Optimizer) -> None:
        """Have no step under way, as all listeners."""
        self.stepping.clear()

    def updated(self, *_: Any, **__: Any) -> None:
        """Do nothing, as all the others."""

    scaled = unscaled = checked = updating = raised = loaded = updated
    repeats = backward_begins = backward_ends = updated
    nested = stepped = clipping = clipped = clipping_values = schedule_steps = updated


def _watched(loop: Loop, folder: Path, held: list[float]) -> Any:
    """Arm the taps again, with a clock around what they call."""
    watch = halfstep.watch(loop.net, folder=folder, name="watched")
    watch._taps.disarm()

    def timed(call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        started = time.perf_counter()
        watch._protected(call, *arguments, **named)
        held[0] += time.perf_counter() - started

    watch._taps = _armed(_clocked(watch._loop, held), timed)
    return watch


def _clocked(listener: Any, held: list[float]) -> Any:
    """Put a clock around the methods that are called without the guard: see hooks.UNGUARDED."""

    def clocked(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments)
            held[0] += time.perf_counter() - started
            return result

        return timed

    for owner, names in ((listener, UNGUARDED), (listener.usual, USUAL)):
        for name in names:
            setattr(owner, name, clocked(getattr(type(owner), name).__get__(owner)))
    return listener


def _armed(listener: Listener, guard: Callable[..., None]) -> Hooks:
    """Return armed taps."""
    hooks = Hooks(listener, guard)
    hooks.arm()
    return hooks


def tools(folder: Path) -> dict[str, Callable[[Loop, torch.Tensor], None]]:
    """Return how the tools that are installed here log a step: wandb offline, with its watch."""

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
    """Return the interpreter of the tools' environment, which is made if need be; else this one."""
    inside, installed = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed.txt"
    if not installed.exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        wanted = [f"torch=={torch.__version__.partition('+')[0]}", "--editable", OUR_WHEEL]
        pinned = [f"{name}=={version}" for name, version in TOOLS.items()]
        pip = [str(inside), "-m", "pip"]
        if subprocess.run([*pip, "install", "--quiet", *wanted, *pinned]).returncode:
            return sys.executable
        installed.write_bytes(subprocess.run([*pip, "freeze"], capture_output=True).stdout)
    return str(inside)


def compare(folder: Path) -> None:
    """Take turns with each tool that is here; print what steps took, in seconds, as JSON."""
    torch.set_num_threads(1)
    os.environ["HALFSTEP_MODE"] = "offline"
    taken = {name: turns(log, folder) for name, log in {OURS: None, **tools(folder)}.items()}
    print(json.dumps(taken), flush=True)


def main() -> None:
    """Print the table, of what was measured where the tools are."""
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
    figures: dict[str, float] = {}
    norms: list[float] = []
    calls = 0.0
    for name, taken in json.loads(figures_line).items():
        weights = "bit-identical" if taken.pop("same") else "DIFFERENT"
        held = {kind: statistics.median(turned) * 1e6 for kind, turned in taken.items()}
        figures[name], norms = held["ours"], [*norms, held["norm"]]
        calls = held.get("calls", calls)
        bare, added = f"{held['bare']:.0f}", f"{held['other'] - held['bare']:.0f}"
        best = f"{min(taken['ours']) * 1e6:.1f}"
        rows.append((name, f"{held['ours']:.1f}", best, bare, added, weights))
    norm = statistics.median(norms)
    rows.append(("the norm's kernels alone", f"{norm:.1f}", "", "", "", ""))
    rows.append(("the calls that are heard alone", f"{calls:.1f}", "", "", "", ""))
    rows += [(name, "not installed", "", "", "", "") for name in TOOLS if name not in figures]
    ours, wandb = figures.pop(OURS), figures.get("wandb")
    fastest = min(figures, key=figures.__getitem__, default=None)
    ratio = f"1/{wandb / ours:.0f} of wandb's" if wandb else "wandb is not installed"
    floor = f"{norm:.1f} of them the norm's kernels, {calls:.1f} the calls"
    report(
        "watch_cost",
        f"≤ {BAR_MICROSECONDS:g} µs a step with scale, skips, loss and norm, on a CPU, "
        f"and ≤ 1/{1 / BAR_RATIO:.0f} of wandb's",
        ("tool", "µs a step", "best turn", "bare step, µs", "longer by, µs", "weights"),
        rows,
        measured=f"{ours:.1f} µs, {floor}; {ratio}",
        peer=f"{fastest} {figures[fastest]:.1f} µs" if fastest else "none installed",
        passed=ours <= BAR_MICROSECONDS and wandb is not None and ours <= wandb * BAR_RATIO,
    )


if __name__ == "__main__":
    main()
