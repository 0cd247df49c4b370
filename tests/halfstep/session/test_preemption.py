"""Signals of batch systems that end a watched script, or go to its own handlers."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep import batch_system
from halfstep.telemetry import uploader
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.run_folder import read_outcome, read_run
from tests import preloaded

SCRIPT = """
import faulthandler, os, signal, sys
import halfstep
def own(number, frame): print("own handler", flush=True)
{before}
watch = halfstep.watch(folder="runs", name="it", mode="offline")
watch.log({{"a": 1}})
{after}
os.kill(os.getpid(), signal.{signal})
print("went on", flush=True)
"""
BATCH = {variable: "" for variable, _ in batch_system.JOBS}
SLURM = BATCH | {"SLURM_JOB_ID": "42"}


def run(folder: Path, name: str, before: str = "", after: str = "", **environment: str) -> Any:
    """Run a script that sends itself a signal; return the process."""
    path = folder / "script.py"
    path.write_text(SCRIPT.format(before=before, after=after, signal=name))
    return preloaded.run(
        [sys.executable, str(path)], timeout=120, cwd=folder, env={**os.environ, **environment}
    )


def outcome(folder: Path) -> Any:
    """Return the outcome, which the uploader writes if the script cannot."""
    files = AttemptFiles(folder / "runs" / "it", 1)
    entry = read_run(files.folder).attempts[0]
    uploader.Training(files, entry.pid, entry.pid_started).close()
    return read_outcome(files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_job_that_is_preempted(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption signal ends the script as before, and signal and job are recorded."""
    number = signal.Signals[name]
    ended = run(tmp_path, name, after="assert signal.getsignal(signal.SIGUSR1) == 0", **SLURM)
    assert (ended.returncode, ended.stdout) == (-number, "")
    for variable, value in SLURM.items():
        monkeypatch.setenv(variable, value)
    found = outcome(tmp_path)
    assert (found.status, found.exit_code) == ("terminated", -number)
    assert found.preemption == f"{name} in Slurm job 42"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("signal.signal(signal.SIGUSR1, own)", ""),
        ("", "signal.signal(signal.SIGUSR1, own)"),
        ("", "signal.signal(signal.SIGUSR1, own); watch.finish()"),
        ("faulthandler.register(signal.SIGUSR1, open(os.devnull, 'w'))", "print('own handler')"),
        ("", "faulthandler.register(signal.SIGUSR1, open(os.devnull, 'w')); print('own handler')"),
        ("", "signal.signal(signal.SIGUSR1, signal.SIG_IGN); print('own handler')"),
    ],
)
def test_a_handler_of_the_script_keeps_working(tmp_path: Path, before: str, after: str) -> None:
    """A script's own signal handler keeps working, installed before or after `watch`."""
    ended = run(tmp_path, "SIGUSR1", before, after, **SLURM)
    assert (ended.returncode, ended.stdout) == (0, "own handler\nwent on\n")
    found = outcome(tmp_path)
    assert (found.status, found.preemption) == ("finished", None)
    assert not [*(tmp_path / "runs" / "it").glob("crash-*")]


@pytest.mark.slow
def test_without_a_batch_system_nothing_is_preempted(tmp_path: Path) -> None:
    """Outside a batch system SIGTERM terminates the script, and SIGUSR1 only ends it."""
    for name, status in (("SIGTERM", "terminated"), ("SIGUSR1", "vanished")):
        (tmp_path / name).mkdir()
        ended = run(tmp_path / name, name, **BATCH)
        assert ended.returncode == -signal.Signals[name]
        assert (outcome(tmp_path / name).status, outcome(tmp_path / name).preemption) == (
            status,
            None,
        )


def test_preemption_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own handler that exits with 128 plus the signal counts as preempted;
    torchrun's SIGTERM does not.
    """
    for variable in (*BATCH, "KUBERNETES_SERVICE_HOST", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert batch_system.preemption(-signal.SIGTERM) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOSTNAME", "pod-1")
    assert batch_system.preemption(128 + signal.SIGTERM) == "SIGTERM in Kubernetes pod pod-1"
    assert batch_system.preemption(1) is None
    assert batch_system.preemption(-signal.SIGKILL) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert batch_system.preemption(-signal.SIGTERM) is None
    assert batch_system.preemption(-signal.SIGUSR1) == "SIGUSR1 in Kubernetes pod pod-1"


@pytest.mark.slow
def test_processes_beside_the_training_outlive_the_signals() -> None:
    """Sidecar and uploader survive the signals that a batch system sends to a job's processes."""
    code = "from halfstep import batch_system; import os, signal; batch_system.ignore_signals()\n"
    code += "for number in batch_system.SIGNALS: os.kill(os.getpid(), number)"
    for environment, returncode in ((SLURM, 0), (BATCH, -signal.SIGTERM)):
        ended = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, check=False
        )
        assert ended.returncode == returncode
