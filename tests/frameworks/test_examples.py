"""The examples that need a framework, run directly and by a worker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halfstep.clock import clock
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import SpoolReader
from tests.frameworks.reference import read_written

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *words: str, folder: Path, **environment: str) -> None:
    """Run an example in a folder to its end."""
    command = [sys.executable, str(EXAMPLES / example), *words]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_lightning_example(tmp_path: Path) -> None:
    """In fp16 the example skips steps on any device, and its losses are numbers."""
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("sklearn")
    run("lightning_digits.py", "--epochs", "1", "--scale", str(2.0**30), folder=tmp_path)
    steps, _events = read_written(tmp_path / "halfstep-runs")
    assert len(steps) == 29
    assert ((steps["flags"] & SKIPPED) != 0).any()
    assert np.isfinite(steps["loss"]).all()


def test_the_transformers_example_in_a_queue(tmp_path: Path) -> None:
    """A queued script's steps are in its run's folder."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "job-1.json").write_text(json.dumps({"started_at": clock()}))
    queued = {"HALFSTEP_RUN_FOLDER": str(folder), "HALFSTEP_ATTEMPT": "1"}
    run("transformers_lm.py", folder=tmp_path, **queued)
    steps = np.concatenate(
        [item for item in SpoolReader(folder / "spool").poll() if isinstance(item, np.ndarray)]
    )
    assert steps["step"].tolist() == list(range(1, 40))
    assert steps["loss"][-5:].mean() < steps["loss"][:5].mean()
    assert not (tmp_path / "halfstep-runs").exists()
