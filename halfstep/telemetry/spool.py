"""Spool format, writer and readers: a training process's steps and events in files.

A spool is a folder of append-only files, `<attempt>-<sequence>.spool`, which a supervisor reads.
Each append is one write of one whole frame, so a killed process loses at most the frame that it
was writing. A database outage does not affect the training: the folder grows.

    file     magic "HSSPOOL\\0", u16 version, zeros up to 16 bytes; then frames
    frame    u32 payload length, u8 kind, 3 zero bytes, u32 crc32(kind + payload), payload
    payload  kind 1: packed STEP_DTYPE records without their last field, data_us, as earlier
             versions wrote them, and still written if data_us is unknown; kind 2: one event, a
             JSON object in UTF-8; kind 3: packed STEP_DTYPE records

All numbers are little-endian.

Events: the classes of halfstep.telemetry.events; halfstep.telemetry.event_codec has their JSON. An
event out of bounds is not written, and is read as Unrecordable.
"""

import io
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from halfstep import untrusted_files
from halfstep.telemetry.event_codec import BadEvent, decode, encode, problem_of_steps
from halfstep.telemetry.events import (
    EVENT_BYTES,
    Artifact,
    Checkpoint,
    Event,
    FileEvent,
    LogPart,
    SavedArtifact,
)

MAGIC, VERSION = b"HSSPOOL\x00", 1
FILE_HEADER = struct.Struct("<8sH6x")
FRAME_HEADER = struct.Struct("<IB3xI")
STEPS, EVENT, TIMED_STEPS = 1, 2, 3
FRAME_KIND = re.compile(rb"[\x01-\x03]\x00\x00\x00")  # from byte 4 of a frame
#: Search for a frame after damaged bytes: window above the largest frame, most bytes checksummed.
WINDOW_BYTES, MOST_CHECKED = EVENT_BYTES + 2**20, 2**26
FILE_NAME = re.compile(r"[0-9]{1,10}-[0-9]{1,10}\.spool")

STEP_DTYPE = np.dtype(
    [
        ("step", "<i8"),  # attempted steps, from 1
        ("elapsed_ms", "<i8"),  # since the run's first start
        ("step_us", "<i4"),
        ("loss", "<f4"),
        ("scale", "<f4"),  # the loss scale used for this step
        ("grad_norm", "<f4"),  # L2 over all parameters, unscaled, before the clip
        ("grad_norm_clipped", "<f4"),
        ("lr", "<f8"),
        ("flags", "<u4"),
        ("data_us", "<i4"),  # part of step_us that the loop waited for data
    ]
)
UNKNOWN_US = -1  # watched loops do not report their wait for data
#: Records without data_us: the same bytes up to there.
UNTIMED_DTYPE = np.dtype([(name, STEP_DTYPE[name]) for name in (STEP_DTYPE.names or ())[:-1]])
# Kinds of events that name files.
_NAMES = [b'"artifact"', b'"checkpoint"', b'"log_part"', b'"saved_artifact"']

Steps: TypeAlias = NDArray[np.void]
Item: TypeAlias = "Steps | Event | Unrecordable"


class Position(NamedTuple):
    """Position of the next unread frame; `_asdict()` gives a JSON object."""

    attempt: int
    sequence: int
    offset: int


class Unrecordable(NamedTuple):
    """Frame with unrecordable content, or damaged bytes."""

    problem: str  # the reason, as text
    kind: int
    payload: bytes
    # Their number, else 0; an item of damaged bytes has neither kind nor payload.
    damaged_bytes: int = 0


class SpoolWriter:
    """Writer that appends steps and events; FileExistsError: this attempt already ran once."""

    _file: io.FileIO

    def __init__(
        self, folder: Path, attempt: int, rotate_bytes: int = 64 * 2**20, sequence: int = 0
    ) -> None:
        """Create the folder and its first file.

        sequence: number of the first file; above 0 after a file that could not be completed.
        """
        self._folder = folder
        self._attempt = attempt
        self._rotate_bytes = rotate_bytes
        self.sequence = sequence
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def steps(self, records: Steps) -> None:
        """Append records of STEP_DTYPE in one frame."""
        if (records["data_us"] < 0).all():  # servers of earlier versions accept these too
            rows = np.ascontiguousarray(records, STEP_DTYPE).view(np.uint8)
            untimed = rows.reshape(-1, STEP_DTYPE.itemsize)[:, : UNTIMED_DTYPE.itemsize]
            self._append(STEPS, untimed.tobytes())
        else:
            self._append(TIMED_STEPS, records.astype(STEP_DTYPE, copy=False).tobytes())

    def event(self, event: Event) -> None:
        """Append one event. Raises BadEvent."""
        self._append(EVENT, encode(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the current file."""
        self._file.close()

    def is_removed(self) -> bool:
        """Return whether the current file has been deleted, perhaps with its folder."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def write_again(self) -> None:
        """Write a deleted file again, from what the open one still has. Raises OSError."""
        content = Path(f"/proc/self/fd/{self._file.fileno()}").read_bytes()
        self._folder.mkdir(parents=True, exist_ok=True)
        again = (self._folder / f"{self._attempt}-{self.sequence}.spool").open("xb", buffering=0)
        self._file.close()
        self._file, self._bytes = again, 0
        self._write(content)

    def _append(self, kind: int, payload: bytes) -> None:
        if self._bytes >= self._rotate_bytes:
            self._file.close()
            self.sequence += 1
            self._open()
        self._write(frame(kind, payload))

    def _open(self) -> None:
        path = self._folder / f"{self._attempt}-{self.sequence}.spool"
        self._file = path.open("xb", buffering=0)
        self._bytes = 0
        try:
            self._write(FILE_HEADER.pack(MAGIC, VERSION))
        except OSError:  # a full disk still creates the name, which would block the next try
            self._file.close()
            path.unlink()
            raise

    def _write(self, data: bytes) -> None:
        self._bytes += len(data)
        # One write writes all, unless the disk is nearly full: then the rest raises OSError.
        while data:
            data = data[self._file.write(data) :]


class SpoolReader:
    """Reader of a spool folder that may still be written, in order of attempts and files.

    A truncated frame stays unread while its file is the newest, because it may still grow.
    Once a newer file exists, the rest of that file is skipped and counted in `torn`.
    Damaged bytes before a whole frame, or that are not a truncated frame, are one Unrecordable.
    """

    def __init__(self, folder: Path, start: Position | None = None) -> None:
        self._folder = folder
        self._position = start
        self.torn = 0
        self._seen_to: tuple[Position, int] | None = None  # no frame follows there, at this size

    def poll(self, limit_bytes: int = 16 * 2**20, *, limit_items: float = math.inf) -> list[Item]:
        """Return the steps and events appended since the last call, oldest first.

        All are of one attempt, that of `position`. A backlog comes in pieces of about
        `limit_bytes` and at most `limit_items`; only an empty list means that there is no more.
        """
        items: list[Item] = []
        # List before reading: a file with a successor in this list gets no more frames.
        files = self._unread()
        is_torn = False
        for path in files:
            attempt, sequence = _name(path)
            if items and self._position is not None and attempt > self._position.attempt:
                break
            self.torn += is_torn
            if self._position is None or self._position[:2] < (attempt, sequence):
                self._position = Position(attempt, sequence, 0)
            start = self._position.offset
            stop = start + limit_bytes
            with untrusted_files.open_file(self._folder, path.name) as file:
                offset, size = _read(file, path, start, stop, items, limit_items)
            self._position = Position(attempt, sequence, offset)
            is_full = len(items) >= limit_items
            is_stuck = offset < min(size, stop) and not is_full
            if is_stuck and self._skip_damage(path, size, items, is_over=path != files[-1]):
                return items
            is_torn = path != files[-1] and is_stuck
            limit_bytes = stop - offset
            if limit_bytes <= 0 or len(items) >= limit_items:
                break
        return items

    def end(self) -> Unrecordable | None:
        """Return the damage after the last frame; call it once the newest file is complete."""
        items: list[Item] = []
        files = self._unread()
        if self._position is None or len(files) != 1:
            return None
        with untrusted_files.open_file(self._folder, files[0].name) as file:
            size = os.fstat(file.fileno()).st_size
        self._skip_damage(files[0], size, items, is_over=True)
        return next((item for item in items if isinstance(item, Unrecordable)), None)

    def _skip_damage(self, path: Path, size: int, items: list[Item], *, is_over: bool) -> bool:
        """Add damaged bytes at the position to items and skip them; return True if there are any.

        is_over: the file is complete.
        """
        here = self._position
        if here is None or here.offset >= size or (not is_over and self._seen_to == (here, size)):
            return False
        with untrusted_files.open_file(self._folder, path.name) as file:
            file.seek(here.offset)
            rest = file.read(WINDOW_BYTES)
        following = next_frame(rest, 0)
        is_whole = here.offset or size >= FILE_HEADER.size
        if following is None and is_over and is_whole and not _is_cut_short(rest):
            following = size - here.offset
        if not following:
            self._seen_to = here, size
            return False
        items.append(_describe_damage(here.offset, following))
        self._position = here._replace(offset=here.offset + following)
        return True

    def position(self) -> Position | None:
        """Return where to resume once the items of `poll` are stored; None: nothing read yet."""
        return self._position

    def release(self, *, delete: bool = False, before: Position | None = None) -> list[Path]:
        """Return the files read to their end that have a successor, and optionally delete them.

        Call it only once the items of `poll` are stored.  before: end of the stored items, if not
        all are.
        """
        if self._position is None:
            return []
        end = min(self._position, before or self._position)
        done = [path for path in self._all_files() if _name(path) < end[:2]]
        for path in done if delete else []:
            untrusted_files.delete(self._folder, path.name)
        return done

    def _unread(self) -> list[Path]:
        files = self._all_files()
        return [p for p in files if self._position is None or _name(p) >= self._position[:2]]

    def _all_files(self) -> list[Path]:
        return spool_files(self._folder)


class SpoolPart:
    """Reader of a part of a spool file, as bytes that may end within a frame.

    offset: the part's position in the file, then that of the next frame. Raises ValueError if the
    part begins with an invalid header.
    """

    def __init__(self, part: bytes, offset: int) -> None:
        self._file, self.offset = io.BytesIO(part), offset
        self._part, self._start = part, offset
        self._has_begun = offset > 0 or (part[: len(MAGIC)] != MAGIC and _has_frame(part))
        if not self._has_begun and _has_header(self._file, "the part"):
            self.offset, self._has_begun = FILE_HEADER.size, True

    def poll(self, limit_bytes: int = 2**20, *, limit_items: float = math.inf) -> list[Item]:
        """Return the items of the next whole frames; an empty list is the end.

        They are about `limit_bytes` and at most `limit_items`. Damaged bytes before a whole frame
        are one Unrecordable.
        """
        items: list[Item] = []
        if not self._has_begun:
            return items
        self._file.seek(self.offset - self._start)  # back to before a damaged frame
        stop = self.offset + limit_bytes
        self.offset = _take_frames(self._file, self.offset, stop, items, limit_items)
        return items or self._skip_damage()

    def _skip_damage(self) -> list[Item]:
        following = next_frame(self._part, self.offset - self._start)
        if following is None or self._start + following <= self.offset:
            return []
        before, self.offset = self.offset, self._start + following
        return [_describe_damage(before, self.offset - before)]


def spool_files(folder: Path) -> list[Path]:
    """Return the files of a spool in order of attempt and sequence."""
    names = filter(FILE_NAME.fullmatch, untrusted_files.names(folder))
    return sorted((folder / name for name in names), key=_name)


def spool_of(folder: Path, attempt: int) -> list[tuple[int, Path]]:
    """Return the sequence numbers and files of an attempt's spool, in order."""
    named = ((_name(path), path) for path in spool_files(folder))
    return [(sequence, path) for (number, sequence), path in named if number == attempt]


def file_events(path: Path, offset: int) -> Iterator[tuple[FileEvent, int]]:
    """Yield a spool file's events that name files, each with its end offset.

    offset: where to start, at a frame; 0: the first one.
    """
    with path.open("rb") as file:
        file.seek(offset or FILE_HEADER.size)
        while next_item := _next_frame(file):
            kind, payload = next_item
            if kind == EVENT and any(name in payload for name in _NAMES):
                event = _decode(kind, payload)
                if isinstance(event, Artifact | Checkpoint | LogPart | SavedArtifact):
                    yield event, file.tell()


def next_frame(data: bytes, start: int) -> int | None:
    """Return the offset of the next whole, undamaged frame; None if there is none.

    Gives up after MOST_CHECKED checksummed bytes, which only malicious bytes can reach.
    """
    checked = 0
    for match in FRAME_KIND.finditer(data, start + 4):
        begin = match.start() - 4
        if begin + FRAME_HEADER.size > len(data):
            return None
        length, kind, checksum = FRAME_HEADER.unpack_from(data, begin)
        payload = begin + FRAME_HEADER.size
        if payload + length > len(data):
            continue
        checked += length
        if checked > MOST_CHECKED:
            return None
        if checksum == _checksum(kind, data[payload : payload + length]):
            return begin
    return None


def lost_bytes(path: Path, *, is_truncated: bool = False) -> int:
    """Return the number of damaged bytes in a complete spool file.

    A last frame that is cut short counts only if the file is_truncated: otherwise its process was
    killed while it wrote.
    """
    with path.open("rb") as file:
        lost = 0
        if file.read(FILE_HEADER.size) != FILE_HEADER.pack(MAGIC, VERSION):
            file.seek(0)
            first = next_frame(file.read(WINDOW_BYTES), 0)
            lost = path.stat().st_size if first is None else first
            file.seek(lost)
        while True:
            begin = file.tell()
            if _next_frame(file):
                continue
            file.seek(begin)
            rest = file.read(WINDOW_BYTES)
            following = next_frame(rest, 0)
            if following is None:
                is_unfinished = _is_cut_short(rest) and not is_truncated
                return lost + (0 if is_unfinished else path.stat().st_size - begin)
            lost += following
            file.seek(begin + following)


def _is_cut_short(rest: bytes) -> bool:
    if len(rest) < FRAME_HEADER.size:
        return True
    length, kind, _ = FRAME_HEADER.unpack_from(rest)
    is_header = kind in (STEPS, EVENT, TIMED_STEPS) and rest[5:8] == bytes(3)
    return is_header and len(rest) - FRAME_HEADER.size < length <= EVENT_BYTES


def _describe_damage(offset: int, size: int) -> Unrecordable:
    text = f"{size:,} damaged bytes of the spool, from byte {offset:,}"
    return Unrecordable(text, 0, b"", damaged_bytes=size)


def frame(kind: int, payload: bytes) -> bytes:
    """Return a frame of a spool file: header and payload."""
    return FRAME_HEADER.pack(len(payload), kind, _checksum(kind, payload)) + payload


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes([kind])))


def _name(path: Path) -> tuple[int, int]:
    attempt, sequence = path.stem.split("-")
    return int(attempt), int(sequence)


def _read(
    file: BinaryIO, name: object, offset: int, stop: int, items: list[Item], limit_items: float
) -> tuple[int, int]:
    """Add whole frames from offset until past stop; return their end and the file's size."""
    has_begun = offset > 0 or _has_lost_header(file)
    if not has_begun and _has_header(file, name):
        offset, has_begun = FILE_HEADER.size, True
    if has_begun:
        file.seek(offset)
        offset = _take_frames(file, offset, stop, items, limit_items)
    return offset, file.seek(0, os.SEEK_END)


def _take_frames(
    file: BinaryIO, offset: int, stop: int, items: list[Item], limit_items: float
) -> int:
    """Add whole frames from the file's position, at offset, until past stop; return the end."""
    while offset < stop and len(items) < limit_items and (next_item := _next_frame(file)):
        kind, payload = next_item
        items.append(_decode(kind, payload))
        offset += FRAME_HEADER.size + len(payload)
    return offset


def _has_header(file: BinaryIO, name: object) -> bool:
    header = file.read(FILE_HEADER.size)
    if len(header) == FILE_HEADER.size and header != FILE_HEADER.pack(MAGIC, VERSION):
        magic, version = FILE_HEADER.unpack(header)
        if magic == MAGIC and version > VERSION:
            raise ValueError(
                f"{name} is a spool file of version {version}; this version of Halfstep reads "
                f"{VERSION}: update it"
            )
        raise ValueError(f"{name} is not a spool file of version {VERSION}")
    return len(header) == FILE_HEADER.size


def _has_lost_header(file: BinaryIO) -> bool:
    """Return True if a file has frames but its header is damaged."""
    start = file.read(len(MAGIC))
    file.seek(0)
    is_lost = len(start) == len(MAGIC) and start != MAGIC and _has_frame(file.read(WINDOW_BYTES))
    file.seek(0)
    return is_lost


def _has_frame(data: bytes) -> bool:
    return next_frame(data, 0) is not None


def _next_frame(file: BinaryIO) -> tuple[int, bytes] | None:
    """Read one whole, undamaged frame; return its kind and payload, or None."""
    header = file.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    length, kind, checksum = FRAME_HEADER.unpack(header)
    if length > WINDOW_BYTES:
        return None
    payload = file.read(length)
    if len(payload) < length or checksum != _checksum(kind, payload):
        return None
    return kind, payload


def _decode(kind: int, payload: bytes) -> Steps | Event | Unrecordable:
    """Return a frame's steps or event, or Unrecordable if they are out of bounds."""
    if kind == EVENT:
        try:
            return decode(payload)
        except BadEvent as error:
            return Unrecordable(str(error), kind, payload)
    record = {STEPS: UNTIMED_DTYPE, TIMED_STEPS: STEP_DTYPE}.get(kind)
    if record is None or len(payload) % record.itemsize:
        text = f"a frame of kind {kind} has {len(payload)} bytes; allowed: whole records of kind 1"
        return Unrecordable(f"{text} or 3, and events of kind 2", kind, payload)
    steps = _add_timing(np.frombuffer(payload, record))
    wrong = problem_of_steps(steps)
    return steps if wrong is None else Unrecordable(wrong, kind, payload)


def _add_timing(steps: Steps) -> Steps:
    """Return records as STEP_DTYPE; data_us is UNKNOWN_US if they lack it."""
    if steps.dtype == STEP_DTYPE:
        return steps
    timed = np.empty(len(steps), STEP_DTYPE)
    timed["data_us"] = UNKNOWN_US
    for name in UNTIMED_DTYPE.names or ():
        timed[name] = steps[name]
    return timed
