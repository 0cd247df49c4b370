"""Writes an imported run to a folder of the format that `halfstep.watch` writes.

There is a step row wherever the loss was logged. Other columns are joined to it: the norm of the
same step, and the latest scale and learning rate. All other values are logged numbers; images,
audio, histograms, tables and other files become artifacts.
"""

import hashlib
import json
import uuid
from array import array
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halfstep.importing import media
from halfstep.importing.columns import columns_of
from halfstep.importing.source import Damaged, Media, Point, SourceRun
from halfstep.session.config_values import as_config
from halfstep.session.logged_values import MOST_BYTES
from halfstep.session.stderr import Messages
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import AttemptEntry, RunFile
from halfstep.telemetry.event_codec import BadEvent
from halfstep.telemetry.events import Artifact, Metric, Resumed
from halfstep.telemetry.flags import NONFINITE_LOSS, SKIPPED, UNKNOWN_NORM
from halfstep.telemetry.run_folder import slug, write_json, write_outcome, write_run_file
from halfstep.telemetry.spool import STEP_DTYPE, UNKNOWN_US, SpoolWriter, Steps

FROM = uuid.UUID("6f1c51c8-0f0c-4f0e-9c0f-2c1a58ab4c11")  # namespace of run ids
IMPORTED = "imported.json"  # written last: identity and fingerprint of the imported run
ROWS = 10_000  # per frame


class Written(NamedTuple):
    """Result of an import."""

    folder: Path  # of the run
    is_new: bool  # False if it was already imported
    steps: int
    numbers: int
    media: int


def write_run(
    run: SourceRun, folder: Path, say: Callable[[str], None], *, project: str | None = None
) -> Written:
    """Write a run's folder unless it is already imported; new data becomes the next attempt.

    say: called with a message about data that is left out. project: overrides the source's.
    """
    run_id = uuid.uuid5(FROM, run.identity).hex
    place = _place(folder, slug(run.name), run_id)
    before: dict[str, Any] = {}
    if (place / IMPORTED).exists():
        before = json.loads((place / IMPORTED).read_text())
        if before["fingerprint"] == run.fingerprint:
            counts = (before["steps"], before["numbers"], before.get("media", 0))
            return Written(place, False, *counts)
    writing = _Writing(run, place, before.get("attempt", 0) + 1, say)
    written = Written(place, True, *writing.write())
    described = RunFile(
        id=run_id,
        name=run.name,
        project=project or run.project,
        config=as_config(run.config),
        tags=list(run.tags),
        started=_moment(writing.started),
        attempts=[_attempt(number, run, writing.started) for number in writing.numbers()],
    )
    write_run_file(place, described)
    marker: dict[str, object] = {"identity": run.identity, "fingerprint": run.fingerprint}
    counted = {"steps": written.steps, "numbers": written.numbers, "media": written.media}
    marker |= {"attempt": writing.files.attempt} | counted
    write_json(place / IMPORTED, marker)  # last: if it is missing, all is written again
    return written


class _Writing:
    """Two passes over a source: the first collects the columns, the second writes the rest."""

    def __init__(
        self, run: SourceRun, folder: Path, attempt: int, say: Callable[[str], None]
    ) -> None:
        self.files = AttemptFiles(folder, attempt)
        self._run, self._say = run, say
        self._messages = Messages(lambda text: say(f"{run.name}: {text}"))
        self._lines: dict[str, _Line] = {}
        self._shift = 0
        self._media: set[str] = set()  # paths of the written files
        self._numbers: dict[str, int] = {}  # by path, the last suffix number of duplicates
        self.started = 0.0

    def numbers(self) -> range:
        """Return the numbers of all attempts."""
        return range(1, self.files.attempt + 1)

    def write(self) -> tuple[int, int, int]:
        """Write spool, media and outcome; return the number of steps, logged numbers and files."""
        column_of = self._first_pass()
        for path in self.files.spool.glob(f"{self.files.attempt}-*.spool"):
            path.unlink()  # of an interrupted import
        loss = self._lines.get("loss")
        with SpoolWriter(self.files.spool, self.files.attempt) as spool:
            if self.files.attempt > 1:
                notes = ["imported again with more data"]
                spool.event(Resumed(step=0, exact=False, notes=notes))
            rows = self._rows(loss) if loss else np.zeros(0, STEP_DTYPE)
            for first in range(0, len(rows), ROWS):
                spool.steps(rows[first : first + ROWS])
            numbers = self._second_pass(spool, column_of, set(rows["step"].tolist()))
        last = int(rows["step"][-1]) if len(rows) else 0
        write_outcome(self.files, self._run.status, last)
        self._messages.end()
        return len(rows), numbers, len(self._media)

    def _first_pass(self) -> dict[str, str]:
        """Collect possible columns, the start time, and whether steps count from 0 or 1."""
        lines: dict[str, _Line] = {}
        first, earliest = 1, None
        unlikely: set[str] = set()
        for point in self._points(complains=True):
            if isinstance(point, Media):
                continue
            if point.time is not None and (earliest is None or point.time < earliest):
                earliest = point.time
            if point.name in unlikely:
                continue
            if point.name not in lines and not columns_of([point.name]):
                unlikely.add(point.name)
                continue
            lines.setdefault(point.name, _Line()).add(point)
        column_of = columns_of(lines)
        for name in [name for name, column in column_of.items() if column == "skipped"]:
            if not set(lines[name].values) <= {0.0, 1.0}:  # another count of this name
                del column_of[name]
        self._lines = {column: lines[name] for name, column in column_of.items()}
        if "loss" in self._lines:
            first = min(self._lines["loss"].steps)
        self._shift = 1 if first == 0 else 0
        known = [moment for moment in (self._run.started, earliest) if moment is not None]
        self.started = min(known, default=0.0)
        return column_of if "loss" in self._lines else {}

    def _rows(self, loss: "_Line") -> Steps:
        steps, losses, times = loss.in_order()
        keep = steps + self._shift >= 1
        if not keep.all():
            self._messages.say_once(f"{int((~keep).sum())} losses of steps below 0 are left out")
        steps, losses, times = steps[keep], losses[keep], times[keep]
        rows = np.zeros(len(steps), STEP_DTYPE)
        rows["step"] = steps + self._shift
        with np.errstate(over="ignore", invalid="ignore"):
            rows["loss"], rows["scale"] = losses, self._latest_values("scale", steps, 1.0)
            rows["lr"] = self._latest_values("lr", steps, np.nan)
            rows["grad_norm"] = rows["grad_norm_clipped"] = self._values_at("grad_norm", steps)
        elapsed = np.nan_to_num(times - self.started, nan=0.0).clip(-1e12, 1e12)
        rows["elapsed_ms"] = (elapsed * 1000).astype(np.int64)
        gaps = np.diff(elapsed, prepend=elapsed[:1]) / np.maximum(np.diff(steps, prepend=-1), 1)
        rows["step_us"] = (gaps * 1e6).clip(0, 2**31 - 1)
        rows["data_us"] = UNKNOWN_US
        rows["flags"] = np.where(np.isfinite(rows["loss"]), 0, NONFINITE_LOSS)
        rows["flags"] |= np.where(self._has_value("grad_norm", steps), 0, UNKNOWN_NORM).astype(
            np.uint32
        )
        rows["flags"] |= np.where(self._values_at("skipped", steps) == 1, SKIPPED, 0).astype(
            np.uint32
        )
        return rows

    def _latest_values(self, column: str, steps: Any, otherwise: float) -> Any:
        """Return the latest value at each step, for values that hold until changed."""
        if column not in self._lines:
            return otherwise
        at, values, _ = self._lines[column].in_order()
        where = np.searchsorted(at, steps, side="right") - 1
        return np.where(where >= 0, values[where.clip(0)], otherwise)

    def _values_at(self, column: str, steps: Any) -> Any:
        """Return the values at exactly these steps, NaN where there is none."""
        if column not in self._lines:
            return np.nan
        at, values, _ = self._lines[column].in_order()
        where = np.searchsorted(at, steps).clip(max=len(at) - 1)
        return np.where(at[where] == steps, values[where], np.nan)

    def _has_value(self, column: str, steps: Any) -> Any:
        """Return whether there is a value at exactly these steps."""
        if column not in self._lines:
            return False
        return np.isin(steps, self._lines[column].in_order()[0])

    def _second_pass(self, spool: SpoolWriter, column_of: dict[str, str], rows: set[int]) -> int:
        """Write all values that are in no step row as logged numbers."""
        numbers = 0
        for point in self._points():
            step = point.step + self._shift
            if isinstance(point, Media):
                self._write_media(spool, point, step)
                continue
            if point.name in column_of and step in rows:
                continue
            time = self.started if point.time is None else point.time
            elapsed_ms = round((time - self.started) * 1000)
            try:
                spool.event(
                    Metric(step=step, name=point.name, value=point.value, elapsed_ms=elapsed_ms)
                )
            except BadEvent as error:
                self._messages.say_once(str(error))
            else:
                numbers += 1
        return numbers

    def _write_media(self, spool: SpoolWriter, logged: Media, step: int) -> None:
        """Write logged media as an artifact, unless it is too large or there are too many."""
        suffix = logged.suffix or media.suffix_of(logged.content)
        if suffix is None or len(logged.content) > MOST_BYTES:
            kind = f"{suffix} over 32 MiB" if logged.suffix else "file that is no PNG, JPEG or WAV"
            self._run.left_out[kind if logged.suffix else f"{kind} up to 32 MiB"] += 1
            return
        if len(self._media) == media.MOST:
            self._run.left_out[f"{suffix} beyond the first {media.MOST:,} files"] += 1
            return
        path = self._find_unused_path(f"artifacts/step-{step:08}/{slug(logged.name)[:80]}", suffix)
        place = self.files.folder / path
        event = Artifact(
            step=step,
            name=place.name,
            path=path,
            size_bytes=len(logged.content),
            sha256=hashlib.sha256(logged.content).hexdigest(),
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(logged.content)
        try:
            spool.event(event)
        except BadEvent as error:
            self._messages.say_once(str(error))
        else:
            self._media.add(path)

    def _find_unused_path(self, path: str, suffix: str) -> str:
        """Return a file name that is unused in this step."""
        free = whole = f"{path}.{suffix}"
        while free in self._media:
            self._numbers[whole] = number = self._numbers.get(whole, 1) + 1
            free = f"{path}-{number}.{suffix}"
        return free

    def _points(self, *, complains: bool = False) -> Any:
        """Yield all readable points; damage ends them, and is reported if `complains`."""
        try:
            yield from self._run.points()
        except (Damaged, ValueError, ArithmeticError, OSError) as error:
            if complains:
                self._say(f"{self._run.name}: {error}; all before it is imported")


class _Line:
    """Points of one name, in compact arrays."""

    def __init__(self) -> None:
        self.steps, self.values, self.times = array("q"), array("d"), array("d")

    def add(self, point: Point) -> None:
        self.steps.append(point.step)
        self.values.append(point.value)
        self.times.append(np.nan if point.time is None else point.time)

    def in_order(self) -> tuple[Any, Any, Any]:
        """Return steps, values and times by step; for duplicate steps the later value."""
        steps = np.array(self.steps)[::-1]
        unique, at = np.unique(steps, return_index=True)
        return unique, np.array(self.values)[::-1][at], np.array(self.times)[::-1][at]


def _place(folder: Path, name: str, run_id: str) -> Path:
    """Return the existing or a new folder for this run."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        place = folder / (name if number == 1 else f"{name}-{number}")
        try:
            if json.loads((place / "run.json").read_text())["id"] == run_id:
                return place
        except (OSError, ValueError, KeyError):
            if not place.exists() or (not (place / "run.json").exists() and _is_ours(place)):
                (place / "spool").mkdir(parents=True, exist_ok=True)
                return place
    raise AssertionError


def _is_ours(place: Path) -> bool:
    """Return whether a folder is left by an import that was interrupted before run.json existed."""
    return place.is_dir() and {path.name for path in place.iterdir()} <= {"spool", "artifacts"}


def _attempt(number: int, run: SourceRun, started: float) -> AttemptEntry:
    return AttemptEntry(attempt=number, started=_moment(started), host=run.host)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
