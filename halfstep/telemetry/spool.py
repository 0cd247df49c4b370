"""The spool: what a training process leaves behind, step by step, for its supervisor to pick up.

A spool is a folder of append-only files, `<attempt>-<sequence>.spool`. Each append is one write
of one whole frame, so a killed process loses at most the frame it was writing, and a database
that is away costs training nothing: the folder grows.

    file     magic "HSSPOOL\\0", u16 version, zeros up to 16 bytes; then frames
    frame    u32 payload length, u8 kind, 3 zero bytes, u32 crc32(kind + payload), payload
    payload  kind 1: packed STEP_DTYPE records without their last field, data_us, as earlier
             versions wrote them, and as they are written where it is not known; kind 2: one event,
             a JSON object in UTF-8; kind 3: packed STEP_DTYPE records

All numbers are little-endian.

Events. A float that JSON lacks is "NaN", "Infinity" or "-Infinity". halfstep.telemetry.events has
the bounds of every field; what is not within them is not written, and read as Unrecordable.

    scaler      kind "skip": one an optimizer that was skipped; culprits, in forward order, are
                [{"name", "inf", "nan"}], the counts in elements of its gradient (of a GPU's, names
                alone: the replay counts); loss_nonfinite
                kind "growth" | "backoff" | "set": scale_before, scale_after; "set" is a scale
                that was set by hand before this step
    metric      step, name, value, elapsed_ms
    checkpoint  step, reason, request, files [{"kind", "path", "size_bytes", "sha256"}]:
                kind "checkpoint", of a state in shards also "shard.0", "shard.1", … and
                "shard.metadata"; "weights", or "weights.<module>" where there are several, and of
                averaged weights "ema" or "ema.<module>";
                write_seconds: what the thread took that wrote them, to the last fsync;
                stall_seconds: how long the loop was held for it;
                upload: whether the uploader of a watched run shall send them
    resumed     step, exact, notes
    configured  config: what the script of a queued command says of itself; the last one counts
    length      step 0, steps: how many the run will attempt, as its epochs come to
    artifact    step, name, path "artifacts/step-00000400/<name>", size_bytes, sha256
    obeyed      step, request: a scale was set, or a step replayed, as asked
    workload    step 0, examples, tokens, flops: of a step, over all devices; peak_flops: what these
                do at most in a second, in the run's precision; device. Null where it is not known
    shapes      step 0, share, count, layers, batch_size: sizes that miss tensor cores; share of
                the weights, count of layers, the largest in words; batch_size: null if it fits
    retry       step, loss, grad_norm, applied: the second attempt, in fp32, at a skipped step
    histogram   step, scale, modules [{"name", "lowest_exponent", "counts", "zeros", "nonfinite",
                "underflow", "near_overflow"}]; see exponents.py
    headroom    step, scale, modules [{"name", "dtype", "activation", "gradient"}]: the largest
                magnitude of each module's output, which is of that type, and of its gradient, times
                the scale; smallest_activation, smallest_gradient: of those that are not zero, where
                it was measured; see headroom.py
    fp8         step, modules [{"name", "activation", "weight", "gradient" and of each of the three
                its _underflow}]: of linear layers in fp8 the largest magnitudes of what they cast,
                and which share of what is not 0 becomes 0; see fp8_ranges.py
    layer_norms step, layers, norms: L2 of each layer's gradients, unscaled, before the clip
    replay      step, exact, notes, requested, scale, found, module, direction "forward" |
                "backward", operation, kind (of a backward one: see evidence/operations.py), dtype,
                largest_input, limit, loss_nonfinite, culprits
                [{"optimizer", "name", "inf", "nan"}]; see replay.py
    spike       step, loss, z: a sudden rise of the loss; rolled_back_to: the step that the run
                went back to for it, told once it did
    rewound     step, from_step, spike, loss, z, examples, rewinds: after from_step the run went
                back to step, for the spike; what was told of steps beyond it counts no more, and
                so many examples are left out; rewinds: so far
    weights     step 0, source, loaded, count, missing, unexpected, mismatched and of each of those
                its _count: of how many weights of the recipe's modules were started from a file;
                of many names the first; see trainer/checkpoints/initial_weights.py
    uncalled    step, modules: that a setting names, and that the first step did not call
    updates     step, modules [{"name", "wanted", "lost", "saved"}]: of weights in bf16 how many had
                a gradient, how many of those have not moved, and, of one that rounds by chance, how
                many moved that would not have otherwise; see updates.py
    poison      step, count, buffers: since the skip of that step these hold an inf or a NaN; of
                many the first; each buffer is told of once; see poison.py
    schedule    step, advanced, skipped: of the steps skipped so far, in how many the learning-rate
                schedule advanced nevertheless; scheduler: the class whose steps were counted, null
                where rates alone show it; see evidence/schedule.py
    precision   step, dtype: of most matrix products and convolutions of a watched loop
    origin      step, scale, direction "forward" | "backward", kind, operation, dtype, module,
                source: where a number first was not finite in an armed step; see evidence/origin.py
                kind, forward: "inputs", "weights" or "inside" of module, "outside" of all modules;
                backward: "overflow" of half precision, "singular" gradient, "hidden" in an
                activation, "elsewhere" than in this process's graph, "compiled": one node of all,
                "unobserved": in a graph of more nodes than are observed
    bad_inputs  step, inputs [{"name", "inf", "nan"}]: variables of the loop, with a loss not finite
    first_nonfinite  step, loss_nonfinite, culprits, finite: the first step of a loop without a
                scaler that was not finite, after so many that were
    direct_step step, count, optimizer, is_scaled: steps of an optimizer outside of its scaler
    not_stepped step, count: updates of the scaler without a step
    scaled_clip step, count, optimizer, max_norm: clips of gradients multiplied by the scale
    bounded_norms  step, steps, norm: the norm times the scale was this in all of so many steps
    uncleared   step, count, optimizer: backward passes that found the last skip's gradients, not
                finite, where they were
    scaler_replaced  step, scale_before, scale_after, count: another scaler, whose state was not
                restored
    no_gradient step, optimizer, parameters, count, of, steps: those without a gradient so far
    no_step     step, passes: so many backward passes, and no optimizer stepped
    no_inf_checks  step, method, optimizers, error: a scaler refused optimizers without gradients
    fp16_gradients  step, count, parameters, error: a scaler refused gradients of type float16
    adam_eps    step, optimizer, eps, count: an eps that is 0 in the type of so many parameters
    left_out    step, diagnosis, reason: one that is wanted, and that this run cannot have
    failed_diagnosis  step, diagnosis, error: one that raised, and is asked no more

What the training process takes from outside is its control file, one JSON object:

    stop        null | "cancel" | "pause" | "preempt"
    requests    [{"id", "kind", "value"}], each obeyed once, at a step boundary, and listed until it
                is recorded that it was: kind "checkpoint", told by the event of that name; "scale",
                the value from the next step on; "replay", of the step that the value names: a past
                one with the weights of now, a later one as soon as it has been attempted
"""

import io
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from halfstep.telemetry import events

MAGIC, VERSION = b"HSSPOOL\x00", 1
FILE_HEADER = struct.Struct("<8sH6x")
FRAME_HEADER = struct.Struct("<IB3xI")
STEPS, EVENT, TIMED_STEPS = 1, 2, 3
FRAME_KIND = re.compile(rb"[\x01-\x03]\x00\x00\x00")  # from byte 4 of a frame
#: In which a frame is looked for behind damaged bytes: more than the largest one takes.
WINDOW_BYTES, MOST_CHECKED = events.EVENT_BYTES + 2**20, 2**26
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
        ("data_us", "<i4"),  # of step_us, what the loop waited for data
    ]
)
UNKNOWN_US = -1  # a loop that is not ours tells nobody what it waits for
#: Of records without data_us: the same bytes up to there.
UNTIMED_DTYPE = np.dtype([(name, STEP_DTYPE[name]) for name in (STEP_DTYPE.names or ())[:-1]])
SKIPPED, NONFINITE_LOSS, NORM_OVERFLOW = 1, 2, 4
NOT_STEPPED = (
    8  # the scaler was updated without a step of the optimizer: neither applied nor skipped
)
UNKNOWN_LOSS = 16  # no backward pass of the step was observed: its NaN is no loss
FLAGGED_OPTIMIZERS = 24
ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps makes one for each event


def optimizer_skipped(index: int) -> int:
    """Return the flag of a skip of this optimizer, counted from 0; 0 beyond the flags' bits."""
    return 1 << (8 + index) if index < FLAGGED_OPTIMIZERS else 0


Steps: TypeAlias = NDArray[np.void]
Event: TypeAlias = dict[str, Any]
Item: TypeAlias = "Steps | Event | Unrecordable"


class Position(NamedTuple):
    """Where the next unread frame begins. A plain JSON object by `_asdict()`."""

    attempt: int
    sequence: int
    offset: int


class BadEvent(ValueError):
    """An event that could not be recorded; the message names field, value and what is allowed."""


class Unrecordable(NamedTuple):
    """A frame that holds what cannot be recorded, or damaged bytes. problem: why, for people.

    damaged_bytes: of what is no frame any more; such an item has neither kind nor payload.
    """

    problem: str
    kind: int
    payload: bytes
    damaged_bytes: int = 0


class SpoolWriter:
    """Appends steps and events. FileExistsError means that this attempt already ran once."""

    def __init__(
        self, folder: Path, attempt: int, rotate_bytes: int = 64 * 2**20, sequence: int = 0
    ) -> None:
        """sequence: of the first file; above 0 after one that could not be written to its end."""
        self._folder = folder
        self._attempt = attempt
        self._rotate_bytes = rotate_bytes
        self.sequence = sequence
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def steps(self, records: Steps) -> None:
        """Append records of STEP_DTYPE, in one frame."""
        if (records["data_us"] < 0).all():  # a server of an earlier version takes these too
            rows = np.ascontiguousarray(records, STEP_DTYPE).view(np.uint8)
            untimed = rows.reshape(-1, STEP_DTYPE.itemsize)[:, : UNTIMED_DTYPE.itemsize]
            self._append(STEPS, untimed.tobytes())
        else:
            self._append(TIMED_STEPS, records.astype(STEP_DTYPE, copy=False).tobytes())

    def event(self, event: Event) -> None:
        """Append one event; floats that JSON lacks become "NaN", "Infinity" or "-Infinity".

        Raises BadEvent.
        """
        if wrong := events.problem_of(event):
            raise BadEvent(wrong)
        payload = _json(event).encode()
        if len(payload) > events.EVENT_BYTES:
            raise BadEvent(_too_long(event["event"], payload))
        self._append(EVENT, payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Append no more."""
        self._file.close()

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
        except OSError:  # a full disk has room for a name: it would be in the way of the next try
            self._file.close()
            path.unlink()
            raise

    def _write(self, data: bytes) -> None:
        self._bytes += len(data)
        # One write takes all, unless the disk is nearly full: then the rest raises OSError.
        while data:
            data = data[self._file.write(data) :]


class SpoolReader:
    """Reads a spool folder while it is being written, over all attempts and files in order.

    A frame cut short stays unread while its file is the newest, for it may still be growing.
    Once a newer file exists the rest of that file is given up, and counted in `torn`.
    Damaged bytes that a whole frame follows, or that are no frame cut short, are one Unrecordable.
    """

    def __init__(self, folder: Path, start: Position | Event | None = None) -> None:
        self._folder = folder
        self._position = Position(**start) if isinstance(start, dict) else start
        self.torn = 0
        self._seen_to: tuple[Position, int] | None = None  # no frame follows there, at this size

    def poll(self, limit_bytes: int = 16 * 2**20, *, limit_items: float = math.inf) -> list[Item]:
        """Return what was appended since the last call, oldest first: arrays and dicts.

        They are of one attempt, that of `position`. A backlog comes in pieces of about
        `limit_bytes` and at most `limit_items`; only an empty list means "no more now".
        """
        items: list[Item] = []
        # List before reading: a file that has a successor here gets no more frames.
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
            offset, size = _read(path, start, stop, items, limit_items)
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
        """Return what is damaged behind the last frame, once nothing writes the newest file."""
        items: list[Item] = []
        files = self._unread()
        if self._position is None or len(files) != 1:
            return None
        self._skip_damage(files[0], files[0].stat().st_size, items, is_over=True)
        return next((item for item in items if isinstance(item, Unrecordable)), None)

    def _skip_damage(self, path: Path, size: int, items: list[Item], *, is_over: bool) -> bool:
        """Add damaged bytes at the position, and go on behind them; return whether there are any.

        is_over: nobody writes the file any more.
        """
        here = self._position
        if here is None or here.offset >= size or (not is_over and self._seen_to == (here, size)):
            return False
        with path.open("rb") as file:
            file.seek(here.offset)
            rest = file.read(WINDOW_BYTES)
        following = next_frame(rest, 0)
        is_whole = here.offset or size >= FILE_HEADER.size
        if following is None and is_over and is_whole and not _is_cut_short(rest):
            following = size - here.offset
        if not following:
            self._seen_to = here, size
            return False
        items.append(_damaged(here.offset, following))
        self._position = here._replace(offset=here.offset + following)
        return True

    def position(self) -> Position | None:
        """Where to go on from, once what `poll` returned is stored. None: nothing seen yet."""
        return self._position

    def release(self, *, delete: bool = False, before: Position | None = None) -> list[Path]:
        """Return the files that are read to their end and have a successor; delete them if told.

        Call it only once what `poll` returned is stored; if not all of it is, say before where.
        """
        if self._position is None:
            return []
        end = min(self._position, before or self._position)
        done = [path for path in self._all_files() if _name(path) < end[:2]]
        for path in done if delete else []:
            path.unlink(missing_ok=True)
        return done

    def _unread(self) -> list[Path]:
        files = self._all_files()
        return [p for p in files if self._position is None or _name(p) >= self._position[:2]]

    def _all_files(self) -> list[Path]:
        return spool_files(self._folder)


class SpoolPart:
    """Reads a part of a spool file, as bytes; it may end in the midst of a frame.

    offset: where in the file the part begins, and then where the next frame does. Raises ValueError
    if the part begins with a header that is none.
    """

    def __init__(self, part: bytes, offset: int) -> None:
        self._file, self.offset = io.BytesIO(part), offset
        self._part, self._start = part, offset
        self._has_begun = offset > 0 or (part[: len(MAGIC)] != MAGIC and _has_frame(part))
        if not self._has_begun and _has_header(self._file, "the part"):
            self.offset, self._has_begun = FILE_HEADER.size, True

    def poll(self, limit_bytes: int = 2**20, *, limit_items: float = math.inf) -> list[Item]:
        """Return the next whole frames, of about `limit_bytes` and at most `limit_items`; an empty
        list is the end. Damaged bytes that a whole frame follows are one Unrecordable.
        """
        items: list[Item] = []
        if not self._has_begun:
            return items
        self._file.seek(self.offset - self._start)  # a damaged frame was read past
        stop = self.offset + limit_bytes
        self.offset = _take_frames(self._file, self.offset, stop, items, limit_items)
        return items or self._skip_damage()

    def _skip_damage(self) -> list[Item]:
        following = next_frame(self._part, self.offset - self._start)
        if following is None or self._start + following <= self.offset:
            return []
        before, self.offset = self.offset, self._start + following
        return [_damaged(before, self.offset - before)]


def spool_files(folder: Path) -> list[Path]:
    """Return the files of a spool in order of attempt and sequence."""
    found = (path for path in folder.glob("*-*.spool") if FILE_NAME.fullmatch(path.name))
    return sorted(found, key=_name)


def spool_of(folder: Path, attempt: int) -> list[tuple[int, Path]]:
    """Return the sequences of an attempt's spool, each with its file, in order."""
    named = ((_name(path), path) for path in spool_files(folder))
    return [(sequence, path) for (number, sequence), path in named if number == attempt]


def file_events(path: Path, offset: int) -> Iterator[tuple[Event, int]]:
    """Yield the events of a spool file that name files, from a frame on, each with its end."""
    with path.open("rb") as file:
        file.seek(offset or FILE_HEADER.size)
        while found := _next_frame(file):
            kind, payload = found
            if kind == EVENT and (b'"artifact"' in payload or b'"checkpoint"' in payload):
                event = _decode(kind, payload)
                if isinstance(event, dict) and event["event"] in ("artifact", "checkpoint"):
                    yield event, file.tell()


def next_frame(data: bytes, start: int) -> int | None:
    """Return where the next whole, unharmed frame begins; None if there is none.

    Gives up after MOST_CHECKED bytes under checksums, which only bytes made for it come to.
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


def lost_bytes(path: Path) -> int:
    """Return how many bytes of a complete spool file are damaged.

    A last frame that is cut short is none of them: its process was killed while it wrote.
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
                return lost + (0 if _is_cut_short(rest) else path.stat().st_size - begin)
            lost += following
            file.seek(begin + following)


def _is_cut_short(rest: bytes) -> bool:
    if len(rest) < FRAME_HEADER.size:
        return True
    length, kind, _ = FRAME_HEADER.unpack_from(rest)
    is_header = kind in (STEPS, EVENT, TIMED_STEPS) and rest[5:8] == bytes(3)
    return is_header and len(rest) - FRAME_HEADER.size < length <= events.EVENT_BYTES


def _damaged(offset: int, size: int) -> Unrecordable:
    text = f"{size:,} damaged bytes of the spool, from byte {offset:,}"
    return Unrecordable(text, 0, b"", damaged_bytes=size)


def frame(kind: int, payload: bytes) -> bytes:
    """Return a payload as a spool file holds it."""
    return FRAME_HEADER.pack(len(payload), kind, _checksum(kind, payload)) + payload


def _json(event: Event) -> str:
    try:
        return ENCODER.encode(event)
    except ValueError:  # a float that JSON lacks: seldom enough to look for it only then
        return ENCODER.encode(json_safe(event))


def json_safe(value: Any) -> Any:
    """Return the value with every non-finite float as "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def plain(value: Any) -> Any:
    """Return the value as json_safe does, with each text as every database and UTF-8 can hold it.

    File names need not be UTF-8: Python has lone surrogates in place of their other bytes.
    """
    if isinstance(value, str):
        return events.cleaned(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return json_safe(value)


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes([kind])))


def _name(path: Path) -> tuple[int, int]:
    attempt, sequence = path.stem.split("-")
    return int(attempt), int(sequence)


def _read(
    path: Path, offset: int, stop: int, items: list[Item], limit_items: float
) -> tuple[int, int]:
    """Add whole frames from offset until past stop; return where they end, and the file's size."""
    with path.open("rb") as file:
        has_begun = offset > 0 or _has_lost_header(file)
        if not has_begun and _has_header(file, path):
            offset, has_begun = FILE_HEADER.size, True
        if has_begun:
            file.seek(offset)
            offset = _take_frames(file, offset, stop, items, limit_items)
        return offset, file.seek(0, os.SEEK_END)


def _take_frames(
    file: BinaryIO, offset: int, stop: int, items: list[Item], limit_items: float
) -> int:
    """Add whole frames from where the file is read, at offset, until past stop; return the end."""
    while offset < stop and len(items) < limit_items and (found := _next_frame(file)):
        kind, payload = found
        items.append(_decode(kind, payload))
        offset += FRAME_HEADER.size + len(payload)
    return offset


def _has_header(file: BinaryIO, name: object) -> bool:
    header = file.read(FILE_HEADER.size)
    if len(header) == FILE_HEADER.size and header != FILE_HEADER.pack(MAGIC, VERSION):
        raise ValueError(f"{name} is not a spool file of version {VERSION}")
    return len(header) == FILE_HEADER.size


def _has_lost_header(file: BinaryIO) -> bool:
    """Return whether a file has frames, and something else where its header is to be."""
    start = file.read(len(MAGIC))
    file.seek(0)
    is_lost = len(start) == len(MAGIC) and start != MAGIC and _has_frame(file.read(WINDOW_BYTES))
    file.seek(0)
    return is_lost


def _has_frame(data: bytes) -> bool:
    return next_frame(data, 0) is not None


def _next_frame(file: BinaryIO) -> tuple[int, bytes] | None:
    """Read one whole, unharmed frame, or None."""
    header = file.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    length, kind, checksum = FRAME_HEADER.unpack(header)
    payload = file.read(length)
    if len(payload) < length or checksum != _checksum(kind, payload):
        return None
    return kind, payload


def _decode(kind: int, payload: bytes) -> Steps | Event | Unrecordable:
    """Return what a frame holds, as far as it can be recorded."""
    record = {STEPS: UNTIMED_DTYPE, TIMED_STEPS: STEP_DTYPE}.get(kind)
    if record is not None and len(payload) % record.itemsize == 0:
        steps = _timed(np.frombuffer(payload, record))
        wrong = events.problem_of_steps(steps)
        return steps if wrong is None else Unrecordable(wrong, kind, payload)
    if kind != EVENT:
        text = f"a frame of kind {kind} has {len(payload)} bytes; allowed: whole records of kind 1"
        return Unrecordable(f"{text} or 3, and events of kind 2", kind, payload)
    if len(payload) > events.EVENT_BYTES:
        return Unrecordable(_too_long("an event", payload), kind, payload)
    try:
        event: Event = json_safe(json.loads(payload))  # Python reads NaN and 1e999 as well
        wrong = events.problem_of(event)
    except (ValueError, RecursionError) as error:
        wrong = f"an event is no JSON: {events.shown(payload)}: {error}"
    return event if wrong is None else Unrecordable(wrong, kind, payload)


def _timed(steps: Steps) -> Steps:
    """Return records of STEP_DTYPE, whichever these are."""
    if steps.dtype == STEP_DTYPE:
        return steps
    timed = np.empty(len(steps), STEP_DTYPE)
    timed["data_us"] = UNKNOWN_US
    for name in UNTIMED_DTYPE.names or ():
        timed[name] = steps[name]
    return timed


def _too_long(what: str, payload: bytes) -> str:
    return f"{what} has {len(payload):,} bytes; allowed: at most {events.EVENT_BYTES:,}"
