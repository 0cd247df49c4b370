"""Batch system that runs this process, and the signals by which it preempts jobs."""

import os
import signal

#: Variables that name the job, with the name of the system.
JOBS = (
    ("SLURM_JOB_ID", "Slurm"),
    ("PBS_JOBID", "PBS"),
    ("LSB_JOBID", "LSF"),
    ("FLUX_JOB_ID", "Flux"),
    ("AWS_BATCH_JOB_ID", "AWS Batch"),
    ("CLOUD_ML_JOB_ID", "Vertex AI"),
    ("AZUREML_RUN_ID", "Azure ML"),
    ("TRAINING_JOB_NAME", "SageMaker"),
    ("SKYPILOT_TASK_ID", "SkyPilot"),
)
#: Signals that no Python handler may take: Lightning installs its own only where it finds none.
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGTERM, *USER_SIGNALS)
#: Set by torchrun, which ends the other ranks by SIGTERM when one has died.
TORCHRUN = "TORCHELASTIC_RUN_ID"


def job() -> str | None:
    """Return the name of the batch system's job that this process belongs to, if any."""
    for variable, system in JOBS:
        if number := os.environ.get(variable):
            return f"{system} job {number}"[:200]
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return f"Kubernetes pod {os.environ.get('HOSTNAME', '')}"[:200].strip()
    return None


def preemption(exit_code: int | None) -> str | None:
    """Return how a process was preempted, by its exit code; None if it was not.

    exit_code: negative for a signal; a shell, or a script's own handler, exits with 128 plus it.
    """
    place = job()
    for number in SIGNALS:
        is_torchrun = number == signal.SIGTERM and TORCHRUN in os.environ
        if place and not is_torchrun and exit_code in (-number, 128 + number):
            return f"{number.name} in {place}"
    return None


def ignore_signals() -> None:
    """Ignore the signals in a process that records how the training ends."""
    for number in SIGNALS if job() else ():
        signal.signal(number, signal.SIG_IGN)
