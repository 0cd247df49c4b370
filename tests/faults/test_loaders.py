"""SIGKILL of trainings with data workers: the same bits, and no orphans."""

import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import COUNTS, often
from tests.site import until
from tests.trainer.conftest import assert_same_bits
from tests.trainer.process_made import start, write_job
from trainer.checkpoints.checkpoint import load

STEPS = often(full=3000, short=800)
RECIPE = f"{Path(__file__).parents[1]}/reading.py:Reading"


@pytest.mark.parametrize("workers", [2, 4])
def test_killed_at_any_moment_it_reads_on_as_if_nothing_had_happened(
    tmp_path: Path, moments: random.Random, workers: int
) -> None:
    """After kills, weights, optimizer and next batch equal those of a run without data workers."""
    times, killed, runs = often(full=20, short=1), 0, 0
    alone = finish(tmp_path / "alone", 0)
    while killed < times:
        folder, attempt, was_killed = tmp_path / str(runs), 1, True
        runs += 1
        while killed < times and was_killed:
            was_killed = kill(folder, attempt, workers, moments)
            killed, attempt = killed + was_killed, attempt + was_killed
        state = finish(folder, workers, attempt) if was_killed else last(folder)
        assert_same_bits(state, alone)
    COUNTS.append(f"training with {workers} data workers killed {killed} times, {runs} runs alike")


def kill(folder: Path, attempt: int, workers: int, moments: random.Random) -> bool:
    """Kill an attempt at a random moment, and wait for its data workers to end."""
    with begin(folder, attempt, workers) as training:
        process = psutil.Process(training.pid)
        until(lambda: training.poll() is not None or len(children(process)) == workers)
        readers = children(process)
        time.sleep(moments.uniform(0, 0.8))
        was_training = training.poll() is None
        training.kill()
        training.communicate()
    until(lambda: not any(each.is_running() and each.status() != "zombie" for each in readers))
    return was_training


def finish(folder: Path, workers: int, attempt: int = 1) -> dict[str, Any]:
    """Let an attempt train to its end; return the state for a next step."""
    with begin(folder, attempt, workers) as training:
        output = training.communicate()
    assert training.returncode == 0, output
    return last(folder)


def last(folder: Path) -> dict[str, Any]:
    """Return the last checkpoint's state that a next step depends on."""
    state = load(folder / "checkpoints" / f"step-{STEPS:08d}.pt")
    return {part: state[part] for part in ("modules", "optimizers", "random", "next_batch")}


def begin(folder: Path, attempt: int, workers: int) -> "subprocess.Popen[bytes]":
    """Start an attempt from the newest checkpoint of the previous one."""
    folder.mkdir(exist_ok=True)
    saved = sorted((folder / "checkpoints").glob("*.pt"))
    config = {
        "training": {"steps": STEPS, "batch_size": 4},
        "data": {"workers": workers, "prefetch": 3},
        "checkpoints": {"every_steps": 100},
    }
    resume = f"checkpoints/{saved[-1].name}" if saved else None
    write_job(folder, recipe=RECIPE, config=config, attempt=attempt, resume=resume)
    return start(folder, attempt)


def children(process: psutil.Process) -> list[psutil.Process]:
    """Return the data workers, or none if the training has ended."""
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []
