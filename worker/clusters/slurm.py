"""Pilots as Slurm's jobs: sbatch, squeue, scancel, and nothing that needs a plugin.

A job that comes near its time limit is sent SIGUSR2: its workers leave a checkpoint and let the run
go back to the queue, where it is placed again.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from db.settings import Settings
from worker.clusters.cluster_check import Finding, told
from worker.clusters.placement import Look, Pilots, PlacementRejected, installation

COMMAND_SECONDS = 60.0
#: A node has to be free for a look at it.
NODE_SECONDS = 300.0
LOG_BYTES = 64 * 1024
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
#: Slurm's own words that people wonder about most.
REASONS = {
    "Resources": "no node with enough free devices",
    "Priority": "jobs with a higher priority are ahead",
    "QOSMaxJobsPerUserLimit": "as many jobs of this user run as the QOS allows",
    "AssocGrpGRES": "the account's devices are all in use",
    "PartitionConfig": "the partition cannot give what it asks for",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit is beyond the partition's",
}


@dataclass(frozen=True)
class _Job:
    id: str
    state: str
    reason: str
    nodes: str


class Slurm:
    """The cluster that this machine's sbatch submits to."""

    name = "slurm"

    def __init__(self, settings: Settings) -> None:
        self._options = settings.slurm_options
        self._grace_seconds = settings.stop_grace_seconds
        self._comment = installation(settings)
        self._logs = settings.data / "placements"

    def place(self, pilots: Pilots) -> None:
        """Submit a job of one task a node, unless there is one. Raises Refused."""
        if self.look(pilots).state != "gone":
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        own = {
            "job-name": pilots.name,
            "comment": self._comment,
            "nodes": pilots.nodes,
            "ntasks-per-node": 1,
            "output": self._log_pattern(pilots),
            "open-mode": "append",
            "signal": f"USR2@{max(60, round(2 * self._grace_seconds))}",
        }
        words = [f"--{name}={value}" for name, value in own.items()]
        asked = self._options.replace("{devices}", str(pilots.devices))
        asked_of = ["sbatch", "--parsable", "--no-requeue", *words, *shlex.split(asked)]
        done = _run(asked_of, _script(pilots))
        if done.returncode:
            raise PlacementRejected(_said(done))

    def look(self, pilots: Pilots) -> Look:
        """Ask squeue, which knows a job for some minutes after its end."""
        jobs = self._jobs(pilots)
        if not jobs:
            return Look("gone", "Slurm does not know it")
        job = next((each for each in jobs if each.state in WAITING | RUNNING), jobs[-1])
        if job.state in WAITING:
            words = REASONS.get(job.reason, job.reason)
            return Look("waiting", f"Slurm job {job.id} is {job.state.lower()}: {words}")
        if job.state in RUNNING:
            return Look("running", f"Slurm job {job.id} on {job.nodes}")
        why = "" if job.reason in ("None", "") else f": {job.reason}"
        return Look("gone", f"Slurm job {job.id} ended as {job.state.lower()}{why}")

    def cancel(self, pilots: Pilots) -> None:
        """Have the job end; its workers are sent SIGTERM and have Slurm's KillWait."""
        jobs = [job.id for job in self._jobs(pilots) if job.state in WAITING | RUNNING]
        if jobs:
            _ask(["scancel", *jobs])

    def log(self, pilots: Pilots) -> str:
        """Return the end of what its workers printed."""
        files = sorted(
            self._logs.glob(f"{pilots.name}.*.log"), key=lambda path: path.stat().st_mtime
        )
        return files[-1].read_bytes()[-LOG_BYTES:].decode(errors="replace") if files else ""

    def check(self) -> Iterator[Finding]:
        """Have a node say what is missing there, asked for as a worker is."""
        options = shlex.split(self._options.replace("{devices}", "1"))
        here = [sys.executable, "-m", "worker.clusters.cluster", "check", "--here", "--json"]
        asked = ["srun", "--quiet", "--nodes=1", "--ntasks=1", *options, *here]
        done = _run(asked, seconds=NODE_SECONDS)
        found = list(told(done.stdout.splitlines()))
        yield from found
        if done.returncode and all(each.is_fine for each in found):
            yield Finding("slurm", _said(done), is_fine=False)

    def _log_pattern(self, pilots: Pilots) -> str:
        return f"{self._logs}/{pilots.name}.%j.log"

    def _jobs(self, pilots: Pilots) -> list[_Job]:
        asked = ["squeue", "--noheader", "--me", "--states=all", f"--name={pilots.name}"]
        lines = _ask([*asked, "--format=%i|%T|%N|%k|%r"]).splitlines()
        rows = [line.split("|", 4) for line in lines]
        return [
            _Job(id_, state, reason, nodes)
            for id_, state, nodes, comment, reason in rows
            if comment == self._comment
        ]


def _script(pilots: Pilots) -> str:
    """Return the job: on each node a worker of a name of its own, which outlives no step."""
    name = f"{pilots.name}-$SLURM_NODEID"
    worker = f"HALFSTEP_WORKER_NAME={name} exec {shlex.join(pilots.command)}"
    return f"#!/bin/sh\nexec srun --kill-on-bad-exit=0 sh -c {shlex.quote(worker)}\n"


def _ask(words: list[str]) -> str:
    """Return what one of Slurm's commands prints. Raises OSError with what it says instead."""
    done = _run(words)
    if done.returncode:
        raise OSError(_said(done))
    return done.stdout


def _run(
    words: list[str], text: str = "", seconds: float = COMMAND_SECONDS
) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's commands, whatever it says. Raises OSError if Slurm does not answer."""
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{words[0]} has not answered for {seconds:.0f} s") from error
    if "Unable to contact slurm controller" in done.stderr or "timed out" in done.stderr:
        raise ConnectionError(_said(done))
    return done


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    return f"{done.args[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}"
