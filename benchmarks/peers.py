"""Delay of a step on the host by telemetry: Halfstep and five other tools, in turns.

Each tool has a virtual environment of its own below .bench-env, with a pinned version, which this
benchmark makes the first time. Each step logs the same three numbers, with a millisecond of native
work between steps, in several rounds through all tools. A tool's figure is the median of its
rounds' means: a mean, since work that a tool puts off to every hundredth step delays the loop too.
The last column is the same with a millisecond of sleep between steps, from which a processor wakes
cold.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from pathlib import Path

from benchmarks.report import report

ENVIRONMENTS = Path(__file__).parents[1] / ".bench-env"
#: mlflow 3.18.0 needs mlflow-skinny 3.18.0, which is not available everywhere.
PEERS = {
    "trackio": "0.43.0",
    "tensorboard": "2.21.0",
    "wandb": "0.31.0",
    "aim": "3.29.1",
    "mlflow": "3.17.2",
}
STEPS, WARM, ROUNDS = 1500, 100, 3
OURS, SPOOL = "ours", "of it, the way to the spool"
#: Of all of it, of the way to the spool, and of that against the fastest peer.
BAR_MICROSECONDS, BAR_SPOOL, BAR_RATIO = 6.0, 5.0, 0.25


class Figures(defaultdict[str, list[float]]):
    """Measurements of each round by label."""

    def __init__(self) -> None:
        super().__init__(list)

    def middle(self) -> dict[str, float]:
        """Return the median over the rounds."""
        return {label: statistics.median(rounds) for label, rounds in self.items()}


def python_of(name: str) -> Path | None:
    """Return the Python of a tool's environment, or None if it cannot be made."""
    return python_with(name, pin(name))


def pin(name: str) -> str:
    """Return a tool's pinned requirement."""
    return f"{name}=={PEERS[name]}"


def python_with(folder_name: str, *requirements: str) -> Path | None:
    """Return the Python of an environment, or None if it cannot be made.

    It is made the first time, and again when its requirements have changed.
    """
    folder = ENVIRONMENTS / folder_name
    python, installed, text = folder / "bin" / "python", folder / "installed", str(requirements)
    if not installed.exists() or installed.read_text() != text:
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *requirements]
        if subprocess.run(pip).returncode:
            return None
        installed.write_text(text)
    return python


def held(command: list[str]) -> list[list[int]] | None:
    """Run a tool; return its lists of nanoseconds, or None if it failed."""
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        ended = subprocess.run([*command, folder], capture_output=True, text=True)
    if ended.returncode:
        print(ended.stderr[-2000:], file=sys.stderr)
        return None
    printed = json.loads(ended.stdout.splitlines()[-1])
    return printed if isinstance(printed[0], list) else [printed]


def main() -> None:
    """Run the tools in turns, and print the comparison."""
    peer = str(Path(__file__).with_name("peer.py"))
    commands = {OURS: [sys.executable, "-m", "benchmarks.ourselves", str(STEPS)]}
    missing = []
    for name in PEERS:
        if python := python_of(name):
            commands[name] = [str(python), peer, name, str(STEPS)]
        else:
            missing.append(name)
    busy, idle, medians = Figures(), Figures(), Figures()
    for _ in range(ROUNDS):
        for name, command in commands.items():
            for kind, means in (("busy", busy), ("idle", idle)):
                labels = [name, SPOOL]
                for label, nanoseconds in zip(labels, held([*command, kind]) or [], strict=False):
                    microseconds = [each / 1000 for each in nanoseconds[WARM:]]
                    means[label].append(statistics.mean(microseconds))
                    if kind == "busy":
                        medians[label].append(statistics.median(microseconds))
    figures = busy.middle()
    rows = [
        (
            f"{label} {PEERS.get(label, '')}".strip(),
            f"{figure:.1f}",
            f"{medians.middle()[label]:.1f}",
            f"{figure / figures[OURS]:.1f} ×",
            f"{idle.middle()[label]:.1f}",
        )
        for label, figure in figures.items()
    ]
    rows += [(f"{name} {PEERS[name]}", "cannot be installed here", "", "", "") for name in missing]
    rows += [(name, "failed", "", "", "") for name in commands if name not in figures]
    fastest = min((name for name in PEERS if name in figures), key=figures.__getitem__)
    spool, limit = figures[SPOOL], BAR_RATIO * figures[fastest]
    report(
        "peers",
        f"≤ {BAR_MICROSECONDS:g} µs a step, of them to the spool ≤ {BAR_SPOOL:g} µs and "
        f"≤ {BAR_RATIO:g} of the fastest peer",
        ("tool", "µs a step, mean", "median", "against ours", "mean after idle steps"),
        rows,
        measured=f"{figures[OURS]:.1f} µs, {spool:.1f} to the spool",
        peer=f"{fastest} {figures[fastest]:.1f} µs",
        passed=figures[OURS] <= BAR_MICROSECONDS and spool <= min(BAR_SPOOL, limit),
    )


if __name__ == "__main__":
    main()
