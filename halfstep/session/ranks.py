"""Further ranks of a distributed training, whose first rank writes the run.

The first rank writes a file with the run's folder, named by their common parent process; on several
machines, which then share the folder of runs, by the launcher's rendezvous. Each further rank has a
sidecar, which keeps its output and its memory in `ranks/<rank>` of that folder, from where the
first rank's sidecar reads them. An exception of a further rank is a file there: torchrun then ends
the others, so the first exception is the cause.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from halfstep import process, redaction
from halfstep.session.stderr import say
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.relay import RelayWriter

RANKS = "ranks"  # folder in the run's folder
ERROR_CHARACTERS = 20_000
#: On several machines, by how much the first rank's file may be older than another rank's process:
#: clocks differ, and a launcher starts all within seconds. An older one is of another training.
CLOCK_SECONDS = 60.0


def rank() -> int:
    """Return this process's rank; 0 without a distributed training."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks that a launcher has started; 1 without a distributed training."""
    return _number("WORLD_SIZE", 1)


def are_on_several_machines() -> bool:
    """Return whether a launcher has started ranks on other machines, too."""
    return world_size() > _number("LOCAL_WORLD_SIZE", world_size())


def _number(variable: str, default: int) -> int:
    """Return a launcher's variable; the default if it is no number, as of other programs."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def meeting_file(runs: Path) -> Path:
    """Return the file by which the ranks of a training find its run, below the runs' folder."""
    parent = os.getppid()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    identity = [process.pid_space(), parent, process.read_start_ticks(parent), restart]
    if are_on_several_machines():
        # Not the restart count: a machine whose own ranks did not fail keeps its number.
        variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        identity = [os.environ.get(name, "") for name in variables]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return runs / f".ranks-{digest[:16]}.json"


def announce(files: AttemptFiles) -> Path:
    """Let further ranks find the run; return the file, which is deleted at its end."""
    path = meeting_file(files.folder.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"folder": str(files.folder), "attempt": files.attempt}))
    return temporary.replace(path)


def retract(path: Path, files: AttemptFiles) -> None:
    """Delete the file of a run that has ended, unless it is that of a later one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text())
        if (content["folder"], content["attempt"]) == (str(files.folder), files.attempt):
            path.unlink()


def read_announced(path: Path) -> AttemptFiles | None:
    """Return the run that the first rank writes; None if it has not begun yet."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        # A killed training leaves the file, and the next one may have its address.
        if are_on_several_machines() and path.stat().st_mtime < _read_start_time() - CLOCK_SECONDS:
            return None
        content = json.loads(path.read_text())
        folder = path.with_name(Path(content["folder"]).name)  # as mounted on this machine
        return AttemptFiles(folder, int(content["attempt"]))
    return None


def say_once(runs: Path, text: str) -> None:
    """Print a line that no other rank of the training has printed."""
    files = read_announced(meeting_file(runs))
    if files is None:
        say(text)
    else:
        RelayWriter(files).print_once(text)


def _read_start_time() -> float:
    """Return when this process has started, in seconds since 1970; 0 if that is unknown."""
    ticks = process.read_start_ticks(os.getpid())
    if ticks is None:
        return 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class RankError(NamedTuple):
    """An uncaught exception of a further rank."""

    time: float  # seconds since 1970
    rank: int
    error: str


def report_exceptions(path: Path, number: int, hidden: Sequence[str]) -> None:
    """Record the uncaught exception of this rank in the run's folder, before it is printed.

    hidden: texts that are replaced by ***.
    """
    before: Callable[..., Any] = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        with suppress(Exception):
            if (files := read_announced(path)) and issubclass(kind, Exception):
                text = "".join(traceback.format_exception(kind, error, trace))
                text = redaction.without(text, *hidden)
                folder = files.folder / RANKS
                folder.mkdir(exist_ok=True)
                place = folder / f"error-{files.attempt}-{number}.json"
                fields = RankError(time.time(), number, text[-ERROR_CHARACTERS:])._asdict()
                place.write_text(json.dumps(fields))
        before(kind, error, trace)

    sys.excepthook = record


def first_error(files: AttemptFiles) -> RankError | None:
    """Return the first exception of a further rank of this attempt, if any."""
    errors = []
    for path in (files.folder / RANKS).glob(f"error-{files.attempt}-*.json"):
        with suppress(OSError, ValueError, TypeError):
            errors.append(RankError(**json.loads(path.read_text())))
    return min(errors, default=None)


def explain(error: str | None, files: AttemptFiles) -> str | None:
    """Return the error of a run that has failed, with the rank that raised first."""
    first = first_error(files)
    if first is None:
        return error
    text = f"Rank {first.rank} raised first:\n{first.error}"
    # The last line is what lists show.
    return text if error is None else f"Rank 0:\n{error.strip()}\n\n{text}"
