"""The relay of numbers from child processes, data loaders' workers say, to their parent's run.

A child appends lines of JSON to a file of its own in the run's folder,
`relay-<attempt>/<pid>.jsonl`; the process that writes the run reads them, and deletes them at its
end. What a child cannot relay it says in a line, once in a run.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.clock import clock
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.stderr import in_a_line, say
from halfstep.telemetry.attempt_files import AttemptFiles

#: Names the run of a process to its children by spawn: its folder, attempt and PID.
PARENT = "HALFSTEP_PARENT_RUN"
MOST_SAID = 20  # lines of all child processes of a run
RECEIVE_SECONDS = 0.2  # between two looks at what children have logged


class Relayed(NamedTuple):
    """The numbers of one call of a child, by name. step: the one that the child named, if any."""

    numbers: dict[str, float]
    step: int | None


class RelayWriter:
    """The end of a child, and of its own children."""

    def __init__(self, files: AttemptFiles) -> None:
        self._files = AttemptFiles(files.folder.absolute(), files.attempt)
        self._folder = _folder(self._files)
        self._pid, self._descriptor = 0, -1

    def log(self, values: Any, step: Any) -> None:
        """Relay the numbers; say which values are none. Raises nothing."""
        try:
            self._log(values, step)
        except Exception as error:  # a full disk, a step that is none
            self.refuse(f"numbers of a child process are not logged: {error}")

    def refuse(self, text: str) -> None:
        """Say a line, if no other child of the run has."""
        said = self._folder / f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with suppress(OSError):  # FileExistsError: another child said it
            if self._is_open() and len([*self._folder.glob("said-*")]) < MOST_SAID:
                said.open("x").close()
                say(text)

    def _log(self, values: Any, step: Any) -> None:
        if not isinstance(values, Mapping):
            what = f"log received {in_a_line(values)}"
            self.refuse(f"{what}; allowed: a dictionary of values by name")
            return
        numbers = {}
        for name, value in values.items():
            try:
                if is_number(value):
                    value = value.detach() if hasattr(value, "detach") else value
                    numbers[str(name)] = float(as_scalar(value))
                    continue
                what = "only numbers of a child process are recorded; log it in the parent"
            except Exception as error:  # of a value that only looks like a number
                what = f"{type(error).__name__}: {error}"
            self.refuse(f"{str(name)[:100]} is not logged: {what}")
        if numbers:
            self._append(Relayed(numbers, None if step is None else int(step)))

    def _append(self, relayed: Relayed) -> None:
        if not self._is_open():
            return
        if self._pid != os.getpid():  # the first line, or the file is that of our parent
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._folder / f"{os.getpid()}.jsonl", flags, 0o666)
            self._pid = os.getpid()
        os.write(self._descriptor, f"{json.dumps(relayed)}\n".encode())

    def _is_open(self) -> bool:
        """Return whether the run goes on; make the folder of the relay."""
        if self._files.outcome.exists() or not self._files.folder.exists():
            return False
        self._folder.mkdir(exist_ok=True)
        return True


class RelayReader:
    """The end of the process that writes the run."""

    def __init__(self, files: AttemptFiles) -> None:
        self._folder = _folder(files)
        self._offsets: dict[str, int] = {}
        self._read_at = clock()

    def is_due(self) -> bool:
        """Return whether it is time for a look."""
        return clock() - self._read_at > RECEIVE_SECONDS

    def receive(self) -> Iterator[Relayed]:
        """Yield what children have logged since the last call."""
        self._read_at = clock()
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path.name, 0))
                for line in file:
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    self._offsets[path.name] = self._offsets.get(path.name, 0) + len(line)
                    with suppress(ValueError, TypeError):  # damaged: by a full disk, say
                        yield _relayed(json.loads(line))

    def close(self) -> None:
        """Delete what was received."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _relayed(line: Any) -> Relayed:
    """Return what a line holds. Raises ValueError."""
    numbers, step = line if isinstance(line, list) else (None, None)
    is_whole = step is None or isinstance(step, int)
    if not is_whole or not isinstance(numbers, dict):
        raise ValueError(f"no call of a child process: {line}")
    return Relayed({name: float(value) for name, value in numbers.items()}, step)


def announce(files: AttemptFiles) -> None:
    """Name the run to children by spawn that this process will start."""
    os.environ[PARENT] = json.dumps([str(files.folder.absolute()), files.attempt, os.getpid()])


def retract() -> None:
    """Name it no more."""
    os.environ.pop(PARENT, None)


def announced() -> AttemptFiles | None:
    """Return the run of the process whose child, by multiprocessing, this one is."""
    process = sys.modules.get("multiprocessing.process")
    parent = process.parent_process() if process else None
    with suppress(ValueError, TypeError):
        folder, attempt, pid = json.loads(os.environ.get(PARENT, ""))
        if parent is not None and parent.pid == pid:
            return AttemptFiles(Path(folder), attempt)
    return None


def _folder(files: AttemptFiles) -> Path:
    return files.folder / f"relay-{files.attempt}"
