"""Pilots as Slurm jobs: uses only sbatch, squeue, srun and scancel, and no plugin.

Shortly before its time limit a job gets SIGUSR2: its workers save a checkpoint and requeue the run,
which is then placed again.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from db.settings import Settings
from worker.clusters.cluster_check import Finding, findings_of_node
from worker.clusters.placement import Pilots, PilotStatus, PlacementRejected, installation

COMMAND_SECONDS = 60.0
#: Timeout of a check on a node, which has to be free.
NODE_SECONDS = 300.0
LOG_BYTES = 64 * 1024
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
#: Explanations of Slurm's most frequent reasons.
REASONS = {
    "Resources": "no node with enough free devices",
    "Priority": "jobs with a higher priority are ahead",
    "QOSMaxJobsPerUserLimit": "this user has reached the QOS limit of running jobs",
    "AssocGrpGRES": "all devices of the account are in use",
    "PartitionConfig": "the partition cannot provide the requested resources",
    "PartitionNodeLimit": "it requests more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit exceeds the partition's",
}


@dataclass(frozen=True)
class _Job:
    id: str
    state: str
    reason: str
    nodes: str


class Slurm:
    """The cluster to which this machine's sbatch submits."""

    name = "slurm"

    def __init__(self, settings: Settings) -> None:
        self._options = settings.slurm_options
        self._grace_seconds = settings.stop_grace_seconds
        self._comment = installation(settings)
        self._logs = settings.data / "placements"

    def place(self, pilots: Pilots) -> None:
        """Submit a job with one task per node, unless it exists. Raises PlacementRejected."""
        if self.poll(pilots).state != "gone":
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
        options = self._options.replace("{devices}", str(pilots.devices))
        command = ["sbatch", "--parsable", "--no-requeue", *words, *shlex.split(options)]
        done = _run(command, _script(pilots))
        if done.returncode:
            raise PlacementRejected(_error_of(done))

    def poll(self, pilots: Pilots) -> PilotStatus:
        """Return the state by squeue, which lists a job for some minutes after its end."""
        jobs = self._jobs(pilots)
        if not jobs:
            return PilotStatus("gone", "Slurm has no such job")
        job = next((found for found in jobs if found.state in WAITING | RUNNING), jobs[-1])
        if job.state in WAITING:
            words = REASONS.get(job.reason, job.reason)
            return PilotStatus("waiting", f"Slurm job {job.id} is {job.state.lower()}: {words}")
        if job.state in RUNNING:
            return PilotStatus("running", f"Slurm job {job.id} on {job.nodes}")
        why = "" if job.reason in ("None", "") else f": {job.reason}"
        return PilotStatus("gone", f"Slurm job {job.id} ended as {job.state.lower()}{why}")

    def cancel(self, pilots: Pilots) -> None:
        """Cancel the job; its workers get SIGTERM and Slurm's KillWait."""
        jobs = [job.id for job in self._jobs(pilots) if job.state in WAITING | RUNNING]
        if jobs:
            _output_of(["scancel", *jobs])

    def log(self, pilots: Pilots) -> str:
        """Return the end of its workers' output."""
        files = sorted(
            self._logs.glob(f"{pilots.name}.*.log"), key=lambda path: path.stat().st_mtime
        )
        return files[-1].read_bytes()[-LOG_BYTES:].decode(errors="replace") if files else ""

    def check(self) -> Iterator[Finding]:
        """Run the check on a node, allocated like a worker's."""
        options = shlex.split(self._options.replace("{devices}", "1"))
        here = [sys.executable, "-m", "worker.clusters.cluster", "check", "--here", "--json"]
        command = ["srun", "--quiet", "--nodes=1", "--ntasks=1", *options, *here]
        done = _run(command, seconds=NODE_SECONDS)
        findings = list(findings_of_node(done.stdout.splitlines()))
        yield from findings
        if done.returncode and all(finding.is_fine for finding in findings):
            yield Finding("slurm", _error_of(done), is_fine=False)

    def _log_pattern(self, pilots: Pilots) -> str:
        return f"{self._logs}/{pilots.name}.%j.log"

    def _jobs(self, pilots: Pilots) -> list[_Job]:
        command = ["squeue", "--noheader", "--me", "--states=all", f"--name={pilots.name}"]
        lines = _output_of([*command, "--format=%i|%T|%N|%k|%r"]).splitlines()
        rows = [line.split("|", 4) for line in lines]
        return [
            _Job(id_, state, reason, nodes)
            for id_, state, nodes, comment, reason in rows
            if comment == self._comment
        ]


def _script(pilots: Pilots) -> str:
    """Return the job script: a uniquely named worker per node, in one step."""
    name = f"{pilots.name}-$SLURM_NODEID"
    worker = f"HALFSTEP_WORKER_NAME={name} exec {shlex.join(pilots.command)}"
    return f"#!/bin/sh\nexec srun --kill-on-bad-exit=0 sh -c {shlex.quote(worker)}\n"


def _output_of(words: list[str]) -> str:
    """Return the output of a Slurm command. Raises OSError with its error message."""
    done = _run(words)
    if done.returncode:
        raise OSError(_error_of(done))
    return done.stdout


def _run(
    words: list[str], text: str = "", seconds: float = COMMAND_SECONDS
) -> "subprocess.CompletedProcess[str]":
    """Run a Slurm command with any exit code. Raises OSError if Slurm does not respond."""
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{words[0]} has not answered for {seconds:.0f} s") from error
    if "Unable to contact slurm controller" in done.stderr or "timed out" in done.stderr:
        raise ConnectionError(_error_of(done))
    return done


def _error_of(done: "subprocess.CompletedProcess[str]") -> str:
    return f"{done.args[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}"
