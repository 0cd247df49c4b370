"""The folder of a watched run.

    <folder>/<run>/run.json             name, project, configuration, tags, attempts
                   spool/<attempt>-<n>.spool
                   artifacts/step-00000400/<name>
                   checkpoints/step-00000400/<name>
                   outcome-<attempt>.json      outcome; absent while it runs, or if it is unknown
                   .outcome-<attempt>.reserved space for the outcome on a full disk; until the end
                   crash-<attempt>             traceback at a fatal signal; see exit_files.py
                   description-<attempt>.json  git state and packages; see source_state.py
                   uploaded.json               files that are uploaded; see sender.py
                   writer.lock                 held by the process that writes the run
                   uploader.lock, .log         lock of the uploader, and its messages
                   relay-<attempt>/            numbers of child processes; see relay.py
                   last-step                   last step of attempts whose spool was deleted

    <folder>/resume                     optional text file that names the run to resume

An attempt is one watching process; its number is that of the run's last attempt plus 1.
"""

import json
import os
import platform
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from msgspec import UNSET
from msgspec.structs import asdict, replace

from halfstep import batch_system, process, redaction
from halfstep.telemetry import refuge
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import (
    AttemptEntry,
    RunFile,
    WatchedOutcome,
    WatchedStatus,
    read_message,
)
from halfstep.telemetry.events import Metric
from halfstep.telemetry.plain_json import plain, safe_repr
from halfstep.telemetry.spool import Position, SpoolReader, spool_files

#: Default folder of runs. A folder "halfstep" next to a script would shadow the package in its
#: imports.
RUNS = "halfstep-runs"
#: Names of so many scripts that a run is named by their folder too.
USUAL_SCRIPTS = ("train", "training", "main", "__main__", "run", "finetune")
RESERVED_BYTES = 16 * 2**10  # for an outcome
MOST_ERROR = 3 * 2**10  # characters of an error that is written there
RESUME, LAST_STEP = "resume", "last-step"
PACKAGES = ("torch", "numpy", "lightning", "transformers", "accelerate", "timm", "halfstep")


def runs_folder(base: Path = Path()) -> Path:
    """Return the default folder of runs."""
    return base / RUNS


def open_run(
    folder: Path,
    *,
    name: str | None = None,
    run: str | None = None,
    project: str | None = None,
    config: object = None,
    tags: Sequence[str] = (),
    secret: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    claim: Callable[[Path], bool] = lambda _: True,
    identity: str | None = None,
) -> AttemptFiles:
    """Create a run's folder, or find that of `run`, and add a new attempt to it.

    config: replaces the values that it names in an existing run.  secret: text that is hidden
    wherever it occurs.  say: called with a message if `run` does not exist.  claim: returns False
    if another process writes the run in this folder.  identity: of a new run on the server; by
    default a random one. Raises RunIsWritten.
    """
    resume = folder / RESUME
    if run is None and resume.is_file():
        run = resume.read_text().strip() or None
    place, written = _place(folder, name, run), None
    is_free = claim(place)
    if (place / "run.json").exists():
        refuge.restore(place)
        written = read_run(place)
    elif run is not None:
        say(f"there is no run {safe_repr(run)} in {folder}; starting a new one")
    attempts = written.attempts if written else []
    if not is_free or (attempts and _is_written(place, attempts[-1])):
        raise RunIsWritten(place, attempts[-1] if attempts else None)
    numbers = [attempt.attempt for attempt in attempts]
    files = AttemptFiles(place, max([*numbers, *_list_spooled(place)], default=0) + 1)
    described = written or RunFile(
        id=identity or uuid.uuid4().hex,
        name=name or run or place.name,
        run=UNSET if run is None or run == place.name else run,
        project=project,
        tags=list(tags),
        started=_now(),
        attempts=[],
    )
    if config is not None:
        redacted = redaction.without(config, secret)
        described = replace(described, config={**(described.config or {}), **redacted})
    described = replace(described, attempts=[*attempts, _attempt(files.attempt, secret)])
    write_run_file(place, described)
    with suppress(OSError):
        _get_reserved_path(files).write_bytes(bytes(RESERVED_BYTES))
    return files


class RunIsWritten(Exception):
    """Another process writes the run; the message names the process and what to do."""

    def __init__(self, place: Path, attempt: AttemptEntry | None) -> None:
        pid, host = (attempt.pid, attempt.host) if attempt else ("(unknown)", "some host")
        who = f"process {pid} on {host}"
        super().__init__(
            f"{who} is writing the run in {place}; allowed: one process at a time. "
            "Give this one another `run` or `name`"
        )


def _is_written(place: Path, attempt: AttemptEntry) -> bool:
    """Return whether another live process on this machine has not ended its attempt."""
    is_ours = attempt.pid == os.getpid()
    ended = AttemptFiles(place, attempt.attempt).outcome.exists()
    return not is_ours and not ended and lives(attempt)


def read_run(folder: Path) -> RunFile:
    """Return the content of run.json. Raises ValueError if it is damaged."""
    return read_message(folder / "run.json", RunFile)


def write_run_file(folder: Path, run: RunFile) -> None:
    """Replace run.json."""
    fields = {name: value for name, value in asdict(run).items() if value is not UNSET}
    attempts = [asdict(attempt) for attempt in run.attempts]
    write_json(folder / "run.json", fields | {"attempts": attempts})


def read_description(folder: Path) -> RunFile:
    """Return a run's description; for a queued run, which has no run.json, only id and name."""
    if (folder / "run.json").exists():
        return read_run(folder)
    return RunFile(id=folder.name, name=f"run {folder.name}", started="", attempts=[])


def configure(folder: Path, config: object, secret: str | None = None) -> None:
    """Replace a run's configuration. secret: text that is hidden wherever it occurs."""
    entries = redaction.without(config, secret)
    write_run_file(folder, replace(read_run(folder), config=entries))


def last_step(files: AttemptFiles) -> int:
    """Return the last step in the local spools of earlier attempts."""
    return _last_row(files)[0]


def came_to(files: AttemptFiles) -> tuple[int, float]:
    """Return the last step of earlier attempts, and the seconds since the run began.

    By this machine's clock, but at least the elapsed time that those attempts recorded, because the
    clock may have been set back.
    """
    step, elapsed_ms = _last_row(files)
    started = datetime.fromisoformat(read_run(files.folder).started)
    return step, max((datetime.now(UTC) - started).total_seconds(), elapsed_ms / 1000)


def _last_row(files: AttemptFiles) -> tuple[int, int]:
    """Return the last step before this attempt and its elapsed_ms; 0 if its spool is deleted."""
    earlier = [_numbers(path) for path in spool_files(files.spool)]
    for attempt, sequence in reversed([entry for entry in earlier if entry[0] < files.attempt]):
        reader, step, elapsed_ms = SpoolReader(files.spool, Position(attempt, sequence, 0)), 0, 0
        while items := reader.poll():
            if reader.position()[:2] > (attempt, sequence):  # type: ignore[index]
                break
            for steps in (item for item in items if isinstance(item, np.ndarray)):
                step = max(step, int(steps["step"].max()))
                elapsed_ms = max(elapsed_ms, int(steps["elapsed_ms"].max()))
        if step:
            return step, elapsed_ms
    remembered = files.folder / LAST_STEP
    return int(remembered.read_text()) if remembered.exists() else 0, 0


def last_logged(files: AttemptFiles) -> int | None:
    """Return the last step of a logged number in the run's local spools; None: there is none."""
    reader, last = SpoolReader(files.spool), -1
    while items := reader.poll():
        logged = (item.step for item in items if isinstance(item, Metric))
        last = max(last, *logged, -1)
    return None if last < 0 else last


def remember_last_step(folder: Path, step: int) -> None:
    """Store the result of `last_step` before its spool is deleted."""
    temporary = folder / f".{LAST_STEP}"
    temporary.write_text(str(step))
    temporary.replace(folder / LAST_STEP)


def write_outcome(
    files: AttemptFiles,
    status: WatchedStatus,
    step: int,
    error: str | None = None,
    exit_code: int | None = None,
) -> None:
    """Write the outcome of an attempt.

    status: finished, failed, terminated, interrupted or vanished.  error: its traceback, or another
    text.  exit_code: of its process, negative for a signal; None if the process continued, or the
    code is unknown.
    """
    spool = sum(path.stat().st_size for _, path in refuge.spool_of(files.spool, files.attempt))
    outcome = WatchedOutcome(
        status=status,
        step=step,
        error=error,
        exit_code=exit_code,
        preemption=None if error else batch_system.preemption(exit_code),
        spool_bytes=spool,
        ended=_now(),
    )
    try:
        write_json(files.outcome, asdict(outcome))
    except OSError:
        try:
            _write_reserved(files, outcome)
        except OSError:
            write_json(refuge.open_refuge(files.folder) / files.outcome.name, asdict(outcome))
    with suppress(OSError):
        _get_reserved_path(files).unlink(missing_ok=True)


def _write_reserved(files: AttemptFiles, outcome: WatchedOutcome) -> None:
    """Write an outcome into the space that was reserved for it. Raises OSError."""
    if outcome.error is not None:  # a traceback ends with its exception
        outcome = replace(outcome, error=outcome.error[-MOST_ERROR:])
    content = json.dumps(plain(asdict(outcome)), ensure_ascii=False).encode()
    with _get_reserved_path(files).open("r+b") as file:
        file.write(content)
        file.truncate()
    _get_reserved_path(files).replace(files.outcome)


def _get_reserved_path(files: AttemptFiles) -> Path:
    return files.outcome.with_name(f".{files.outcome.stem}.reserved")


def read_outcome(files: AttemptFiles, *, lives: bool = False) -> WatchedOutcome | None:
    """Return the outcome of an attempt with its exit code; None if it has none yet.

    lives: its process is alive. Raises ValueError if the file is damaged.
    """
    try:
        path = refuge.within(files.folder, files.outcome.name)
        outcome = read_message(path, WatchedOutcome)
    except FileNotFoundError:
        return None
    if outcome.status == "finished" and files.exit_code.exists():
        code = files.exit_code.read_bytes()
        if not code and lives:
            return None
        if code and code[0]:
            return replace(outcome, status="failed", exit_code=code[0])
    return outcome


def is_here(attempt: AttemptEntry) -> bool:
    """Return whether this process sees the PIDs that the attempt's process saw.

    False in another container, on another machine and after a reboot, even with one host name.
    """
    space = process.pid_space()
    return space is not None and attempt.pid_space == space


def lives(attempt: AttemptEntry) -> bool:
    """Return whether the process of an attempt in run.json is alive on this machine."""
    return is_here(attempt) and process.lives(attempt.pid, attempt.pid_started)


def is_dead(attempt: AttemptEntry) -> bool:
    """Return whether the process of an attempt is known to be dead."""
    return (
        is_here(attempt)
        and attempt.pid_started is not None
        and not process.lives(attempt.pid, attempt.pid_started)
    )


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(plain(content), indent=2, allow_nan=False))
        temporary.replace(path)
    except OSError:  # a full disk still creates the name
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def is_called(place: Path, name: str) -> bool:
    """Return whether a run has this name, which may be invalid for a folder ("my run/1")."""
    if name == place.name:
        return True
    with suppress(OSError, ValueError):
        described = read_run(place)
        return name in (described.run, described.name)
    return False


def run_called(folder: Path, run: str) -> Path | None:
    """Return the folder of a run below a folder; None if there is none of this name."""
    return next(runs_called(folder, run), None)


def runs_called(folder: Path, run: str) -> Iterator[Path]:
    """Yield the folders of all runs of a name below a folder, oldest first."""
    base, number = slug(run), 1
    while (place := folder / (base if number == 1 else f"{base}-{number}")).is_dir():
        if (place / "run.json").exists() and is_called(place, run):
            yield place
        number += 1


def slug(name: str) -> str:
    """Return a name converted to a valid folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100] or "run"


def _place(folder: Path, name: str | None, run: str | None) -> Path:
    """Return the folder of an existing run, or a new one."""
    if run is not None and slug(run) == run:
        place = folder / run
        place.mkdir(parents=True, exist_ok=True)
        return place
    base = slug(run or name or f"{script_name()}-{datetime.now():%Y%m%d-%H%M%S}")
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        place = folder / (base if number == 1 else f"{base}-{number}")
        try:
            place.mkdir()
        except FileExistsError:
            if run is not None and is_called(place, run):
                return place
            number += 1
        else:
            return place


def script_path() -> Path | None:
    """Return the path of the script that this process runs; None at a prompt or of a text."""
    return Path(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c") else None


def script_name() -> str:
    """Return a name for the script: with its folder, if many scripts have its own."""
    path = script_path()
    if path is None:
        return "run"
    folder = path.absolute().parent.name if path.stem in USUAL_SCRIPTS else ""
    return f"{folder}-{path.stem}" if folder else path.stem


def _list_spooled(place: Path) -> list[int]:
    return [_numbers(path)[0] for path in spool_files(place / "spool")]


def _numbers(path: Path) -> tuple[int, int]:
    attempt, sequence = path.stem.split("-")
    return int(attempt), int(sequence)


def _attempt(number: int, secret: str | None) -> AttemptEntry:
    return AttemptEntry(
        attempt=number,
        started=_now(),
        host=platform.node(),
        pid=os.getpid(),
        pid_started=process.read_start_ticks(os.getpid()),
        pid_space=process.pid_space(),
        command=redaction.command(_command_line(), secret),
        folder=str(Path.cwd()),
        versions={"python": platform.python_version(), **_versions()},
    )


def _command_line() -> list[str]:
    """Return the command line of this process: with `-m` and options of Python, if it has them."""
    words, given = sys.orig_argv, sys.argv[1:]
    is_own = words[len(words) - len(given) :] == given and "--multiprocessing-fork" not in words
    return [Path(words[0]).name, *words[1:]] if is_own and len(words) > 1 else ["python", *sys.argv]


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
