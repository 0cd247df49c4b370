"""The training process of one attempt: `python -m trainer.process <folder> <attempt>`.

It reads its job from the run's folder, trains, and writes events to the spool there; at last it
writes the outcome file. It uses no database, and no network except between ranks. With `--devices`
or `--nodes` it starts one such process per device (`trainer.distributed.local_ranks`), which ends
with this one, as this one ends with its parent.

This module imports nothing heavy before `main` has set the parent death signal.
"""

import argparse
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import psutil

from halfstep.isolation import PARENT, Isolation
from halfstep.process import end_with_parent
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import Status, TrainingOutcome, encode
from trainer.distributed.local_ranks import NodeRank, start_ranks
from trainer.distributed.sockets import shorten
from trainer.lease_guard import Guard


def main() -> None:
    """Train, and exit with 1 if it failed."""
    tie_to_parent()
    Isolation.from_environment(os.environ).apply()
    parser = argparse.ArgumentParser(prog="python -m trainer.process", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--control-folder", type=Path, help="folder of the job; default: FOLDER")
    parser.add_argument("--devices", type=int, default=1, help="ranks to start, one per device")
    parser.add_argument("--nodes", type=int, default=1, help="machines, with as many ranks each")
    parser.add_argument("--node", type=int, default=0, help="number of this machine")
    options = parser.parse_args()
    files = AttemptFiles(options.folder, options.attempt, options.control_folder)
    place = NodeRank(options.devices, options.nodes, options.node)
    if place.world_size > 1:
        sys.exit(start_ranks(files, place))
    code = run_attempt(files)
    if "RANK" in os.environ:
        # All is written. At exit a thread of the process group may still be running, which makes
        # C++ abort: a rank that trained to its end would look killed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def tie_to_parent() -> None:
    """End with the parent, so that no training outlives its supervisor."""
    end_with_parent()
    supervisor = os.environ.get(PARENT)
    # The parent may have died before the line above. For a rank it is the parent's parent. In
    # namespaces a training has no parent, and ends with its first process.
    family = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if supervisor and int(supervisor) not in family:
        sys.exit(f"the supervisor, process {supervisor}, is gone")


def run_attempt(files: AttemptFiles) -> int:
    """Train according to job-<attempt>.json; return the exit code. Errors are in the outcome."""
    signals = Signals()
    shorten()
    # Imports torch, which takes seconds: signals in that time are not lost.
    from trainer.job import Job

    guard = Guard(files)
    guard.start()
    job = Job(files, stop_wanted=lambda: signals.has_received() or guard.asks())
    try:
        outcome = job.train()
    except (Exception, SystemExit) as error:
        # The only broad except: any exception of a recipe belongs on the run's page.
        failure_kind, text = failure_kind_of(error)
        if isinstance(error, SystemExit):
            text += f"The recipe called sys.exit({error.code!r}): raise an exception instead.\n"
        sys.stderr.write(f"{text.rstrip()}\n")
        try:
            write_outcome(files, "failed", job.last_step, text, failure_kind)
        except OSError as error:  # a full disk: reported by the exit code
            return error.errno or 1
        return 1
    if job.rank == 0:
        write_outcome(files, outcome.status, outcome.step)
    return 0


class Signals:
    """Requests by SIGTERM and SIGINT to stop at the next step boundary with a checkpoint."""

    def __init__(self) -> None:
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def has_received(self) -> bool:
        """Return whether a signal was received."""
        return self._received

    def _receive(self, _number: int, _frame: object) -> None:
        self._received = True


def failure_kind_of(error: BaseException) -> tuple[str, str]:
    """Return the kind of a failure and its text.

    "code", "settings" that only a worker can find wrong, "rule" of the configuration, or "rank" if
    another rank was lost, whose own failure is the cause.
    """
    from halfstep.recipe import RecipeError
    from halfstep.run_config import ConfigError
    from trainer.checkpoints.checkpoint import CheckpointError
    from trainer.checkpoints.weight_files import WeightsError
    from trainer.distributed.ranks import is_desertion
    from trainer.precision.scale_policies import RuleError

    if isinstance(error, RuleError):
        return "rule", str(error)
    if isinstance(error, ConfigError | CheckpointError | WeightsError):
        return "settings", str(error)
    text = traceback.format_exc()
    if isinstance(error, RecipeError):  # its message says all; the path of the class is of no use
        text = text.replace(f"\n{RecipeError.__module__}.", "\n")
    return "rank" if is_desertion(error) else "code", text


def write_outcome(
    files: AttemptFiles,
    status: Status,
    step: int,
    error: str | None = None,
    failure_kind: str | None = None,
) -> None:
    """Write the attempt's outcome. The first rank to fail wins: the others fail because of it."""
    outcome = TrainingOutcome(status=status, step=step, error=error, failure_kind=failure_kind)
    path = files.outcome
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(encode(outcome))
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        path.hardlink_to(temporary)  # unlike a rename, it does not replace
    temporary.unlink()


if __name__ == "__main__":
    main()
