"""Hydra with `halfstep.hydra.Watch`, compared with unwatched jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.reference import RecordingScaler, assert_true

pytest.importorskip("hydra")
ROOT = Path(__file__).parents[2]
CONFIG = """
rate: 0.01
batch: {size: 8, name: "of_${batch.size}"}
hydra:
  job: {chdir: true}
  callbacks:
    halfstep:
      _target_: halfstep.hydra.Watch
      project: digits
"""


def run(folder: Path, *overrides: str, mode: str = "offline") -> subprocess.CompletedProcess[str]:
    """Run the program in a folder to its end."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    program = ["-m", "tests.frameworks.hydra_made", "--config-dir", str(folder)]
    env = {**os.environ, "HALFSTEP_MODE": mode, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *program, *overrides], cwd=folder, env=env, capture_output=True, text=True
    )


def read_trained(folder: Path) -> list[Any]:
    """Return a job's written results."""
    return torch.load(folder / "trained.pt")


def test_each_job_of_a_multirun_is_a_run(tmp_path: Path) -> None:
    """Each job of a multirun has its configuration, and the weights of an unwatched one."""
    sweep = ("--multirun", "rate=0.01,0.02", "hydra.sweep.dir=swept")
    bare = run(tmp_path / "bare", *sweep, mode="disabled")
    watched = run(tmp_path / "watched", *sweep)
    assert (bare.returncode, watched.returncode) == (0, 0), bare.stderr + watched.stderr
    assert not (tmp_path / "bare" / "halfstep-runs").exists()
    for job, rate in enumerate((0.01, 0.02)):
        *decisions, weights = read_trained(tmp_path / "watched" / "swept" / str(job))
        *decisions_without, weights_without = read_trained(tmp_path / "bare" / "swept" / str(job))
        assert decisions == decisions_without
        assert all(map(torch.equal, weights, weights_without))
        scaler = RecordingScaler()
        scaler.scales, scaler.skipped, scaler.culprits = decisions
        [place] = (tmp_path / "watched" / "halfstep-runs").glob(f"rate*{rate}")
        assert_true(place, scaler)
        described = json.loads((place / "run.json").read_text())
        assert described["name"] == f"rate={rate}"
        assert described["config"] == {"rate": rate, "batch": {"size": 8, "name": "of_8"}}
        assert (described["project"], described["tags"]) == ("digits", ["swept"])
        assert json.loads((place / "outcome-1.json").read_text())["status"] == "finished"


def test_a_job_that_raises_fails_its_run(tmp_path: Path) -> None:
    """A job that raises fails the program as without a watch, and its run has the traceback."""
    ended = run(tmp_path, "rate=0.6")
    assert ended.returncode == 1
    [place] = (tmp_path / "halfstep-runs").iterdir()
    assert json.loads((place / "run.json").read_text())["tags"] == []
    outcome = json.loads((place / "outcome-1.json").read_text())
    assert outcome["status"] == "failed"
    assert "KeyError: 'broken'" in outcome["error"]
