"""Parquet files of steps in the store: one file per run, in row groups of consecutive steps.

Integers are DELTA_BINARY_PACKED, floats BYTE_STREAM_SPLIT, pages compressed by zstd and with
checksums: about 11 bytes a step. lr_bits are the bits of lr as an integer: of a schedule they take
half of the bytes. A null is a NaN, and grad_norm_clipped is null where the clip changed nothing, as
in the table. summaries has the lowest level of the pyramid: the packed summary of a bucket at the
bucket's first step, an empty list at the others.
"""

import io
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import file_digest, sha256
from itertools import chain
from threading import Lock
from typing import IO, Any, TypeAlias

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.store import MemoryStore, ObjectStore

from db.errors import StepsUnreadable, StorageUnreachable

#: Format of a file, and its key in the footer; files of 0.1.0 have none. A change comes with a
#: migration, since `halfstep storage check --mend` of an earlier version would delete such a file.
FORMAT, FORMAT_KEY = 1, b"halfstep.format"
#: Folder of the files in the store. Not in the folders of runs, where recipes may put symlinks.
STEPS = "steps"
#: Steps of a row group, which is read as a whole.
GROUP_STEPS = 32_768
#: Row groups that are read at once, at most: about 10 MB.
MOST_GROUPS = 32
#: Bytes between two parts of a file up to which one request reads both; others are concurrent.
GAP_BYTES = 2**16
#: Bytes at the end of a file that are read first: the whole footer of most files.
FOOTER_BYTES = 2**19
#: Requests for parts of a file that obstore makes at once; further ones have another thread.
REQUESTS = 10
#: Files whose footers are cached.
MOST_FOOTERS = 32
#: Bytes of row groups that are cached: a chart reads first steps and then summaries of the same.
CACHED_BYTES = 2**25

#: Columns of the table of steps, all in order of step. Unknown values are NaN. SUMMARIES are bytes,
#: empty at most steps.
Columns: TypeAlias = dict[str, NDArray[Any]]
#: First and last step, both inclusive.
StepRange: TypeAlias = tuple[int, int]

WHOLE = ("step", "elapsed_ms", "step_us", "flags")
#: Floats that are stored in four bytes if that changes none of them.
SHORT = ("loss", "scale", "grad_norm", "grad_norm_clipped")
NAMES = (
    *("step", "elapsed_ms", "loss", "scale", "grad_norm", "grad_norm_clipped"),
    *("lr", "step_us", "data_us", "flags"),
)


#: Names in the file of columns that are stored otherwise.
STORED_NAMES = {"lr": "lr_bits"}
SUMMARIES = "summaries"
NAN_BITS = int(np.float64(np.nan).view(np.int64))


class _TooShort(Exception):
    """A column of floats does not fit four bytes each."""


@dataclass(frozen=True)
class StepFile:
    """A file in the store. No other file ever has its key."""

    key: str
    size_bytes: int
    footer_sha256: str


@dataclass(frozen=True)
class _Footer:
    metadata: Any

    @cached_property
    def spans(self) -> NDArray[np.int64]:
        """First and last step of each row group."""
        statistics = [
            self.metadata.row_group(group).column(0).statistics
            for group in range(self.metadata.num_row_groups)
        ]
        spans = [(each.min, each.max) for each in statistics]
        return np.array(spans, np.int64).reshape(len(spans), 2)

    def has_gaps(self, group: int) -> bool:
        """Return whether a row group lacks steps between its first and its last."""
        first, last = self.spans[group].tolist()
        return bool(last - first + 1 > self.metadata.row_group(group).num_rows)

    def part(self, group: int, names: Collection[str]) -> tuple[int, int]:
        """Return where the bytes of columns of a row group begin and end."""
        starts, ends, stored = [], [], set(map(_stored, names))
        for index in range(self.metadata.num_columns):
            column = self.metadata.row_group(group).column(index)
            if column.path_in_schema.partition(".")[0] in stored:
                start = column.dictionary_page_offset or column.data_page_offset
                starts.append(start)
                ends.append(start + column.total_compressed_size)
        return min(starts), max(ends)


@dataclass(frozen=True)
class _Part:
    """Consecutive bytes of a file."""

    start: int
    content: bytes

    def has(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.start + len(self.content)


def check_has_steps(store: ObjectStore) -> None:
    """Check that the store has files of steps: some are recorded. Raises StorageUnreachable.

    Otherwise no file is lost: a disk is not mounted, or it is another store.
    """
    try:
        file = next(iter(obstore.list(store, prefix=STEPS)), None)
    except (OSError, obstore.exceptions.BaseError) as error:
        raise StorageUnreachable from error
    if not file:
        raise StorageUnreachable(
            f"The storage has no file in the folder {STEPS!r}, with the steps of runs that have "
            "ended: mount it, or let HALFSTEP_DATA or HALFSTEP_STORAGE_URL name the storage."
        )


class StepFiles:
    """Reader of the files in a store; safe for threads.

    open_store: opens the store; called once, with the first file.
    """

    def __init__(self, open_store: Callable[[], ObjectStore]) -> None:
        self._open_store = open_store
        self._footers: OrderedDict[str, _Footer] = OrderedDict()
        self._parts: OrderedDict[tuple[str, int], _Part] = OrderedDict()
        self._parts_bytes = 0
        self._lock = Lock()

    @cached_property
    def _store(self) -> ObjectStore:
        return self._open_store()

    def read(
        self, file: StepFile, ranges: Collection[StepRange], names: Collection[str] = NAMES
    ) -> Columns:
        """Read columns of ranges of steps, `step` among them.

        Raises StepsUnreadable, StorageUnreachable.
        """
        names = [name for name in NAMES if name == "step" or name in names]
        with self._errors_named(file):
            parts = [
                _within(part, ranges)
                for part in self._read_groups(file, self._needed(file, ranges), names)
            ]
        kinds = {name: np.int64 if name in WHOLE else np.float64 for name in names}
        empty = {name: np.empty(0, kind) for name, kind in kinds.items()}
        return {name: np.concatenate([part[name] for part in (empty, *parts)]) for name in names}

    def summaries(
        self, file: StepFile, ranges: Collection[StepRange]
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """Return the first step and the packed summary of each bucket that begins in ranges.

        Raises StepsUnreadable, StorageUnreachable.
        """
        steps, packed = [np.empty(0, np.int64)], []
        with self._errors_named(file):
            needed = self._needed(file, ranges)
            has_gaps = any(map(self._footer(file).has_gaps, needed)) if needed else False
            names = ["step", SUMMARIES] if has_gaps else [SUMMARIES]
            for groups, table in self._tables(file, needed, names):
                column = table[SUMMARIES].combine_chunks()
                rows = np.flatnonzero(np.diff(column.offsets))
                step = (
                    table["step"].to_numpy()[rows]
                    if has_gaps
                    else self._steps_at(file, groups, rows)
                )
                is_within = _is_within(step, ranges)
                steps.append(step[is_within])
                values = column.flatten()
                records = np.frombuffer(values.buffers()[1], f"V{values.type.byte_width}")
                packed += records[values.offset :][: len(values)][is_within].tolist()
        return np.concatenate(steps), packed

    def read_ahead(
        self,
        file: StepFile,
        steps: Collection[StepRange],
        names: Collection[str],
        summaries: Collection[StepRange],
    ) -> None:
        """Cache by concurrent requests what `read` and `summaries` of these ranges need.

        They verify it. Raises StepsUnreadable, StorageUnreachable.
        """
        with self._errors_named(file):
            spans: dict[int, tuple[int, int]] = {}
            for ranges, some in ((steps, {"step", *names}), (summaries, {"step", SUMMARIES})):
                for group in self._needed(file, ranges):
                    start, end = self._footer(file).part(group, some)
                    first, last = spans.get(group, (start, end))
                    spans[group] = (min(start, first), max(end, last))
            if 1 < len(spans) <= MOST_GROUPS:
                self._cache(file, self._read_parts(file, dict(sorted(spans.items()))))

    def read_next(self, file: StepFile, span: StepRange, most: int) -> Columns:
        """Read all columns of the first `most` steps of a range.

        Raises StepsUnreadable, StorageUnreachable.
        """
        parts, count = [self.read(file, [])], 0
        for clipped in self._clipped(file, span):
            parts.append(self.read(file, [clipped]))
            count += len(parts[-1]["step"])
            if count >= most:
                break
        return {name: np.concatenate([part[name] for part in parts])[:most] for name in NAMES}

    def read_last(self, file: StepFile, span: StepRange, most: int) -> Columns:
        """Read all columns of the last `most` steps of a range.

        Raises StepsUnreadable, StorageUnreachable.
        """
        parts, count = [self.read(file, [])], 0
        for clipped in reversed(self._clipped(file, span)):
            parts.insert(1, self.read(file, [clipped]))
            count += len(parts[1]["step"])
            if count >= most:
                break
        return {name: np.concatenate([part[name] for part in parts])[-most:] for name in NAMES}

    def ends(self, file: StepFile, span: StepRange) -> StepRange | None:
        """Return the first and the last step within a range, or None if there are none.

        Raises StepsUnreadable, StorageUnreachable.
        """
        clipped = self._clipped(file, span)
        if not clipped:
            return None
        footer, steps = self._footer(file), list[int]()
        for part in {clipped[0], clipped[-1]}:
            group = int(np.searchsorted(footer.spans[:, 1], part[0]))
            steps += self._steps(file, part) if footer.has_gaps(group) else part
        return (min(steps), max(steps)) if steps else None

    def _steps_at(
        self, file: StepFile, groups: Sequence[int], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the steps of rows of a table of row groups without gaps."""
        spans = self._footer(file).spans[groups]
        ends = np.cumsum(spans[:, 1] - spans[:, 0] + 1)
        group = np.searchsorted(ends, rows, side="right")
        steps: NDArray[np.int64] = spans[group, 1] + 1 + rows - ends[group]
        return steps

    def _steps(self, file: StepFile, span: StepRange) -> list[int]:
        steps: list[int] = self.read(file, [span], ["step"])["step"].tolist()
        return steps

    def _clipped(self, file: StepFile, span: StepRange) -> list[StepRange]:
        """Return the part of each row group within a range, if there is one."""
        if span[0] > span[1]:
            return []
        with self._errors_named(file):
            spans = self._footer(file).spans.tolist()
        parts = [(max(low, span[0]), min(high, span[1])) for low, high in spans]
        return [(low, high) for low, high in parts if low <= high]

    def groups(self, file: StepFile) -> Iterator[Columns]:
        """Yield all columns of each row group.

        Raises StepsUnreadable, StorageUnreachable.
        """
        with self._errors_named(file):
            for group in range(len(self._footer(file).spans)):
                yield from self._read_groups(file, [group], (*NAMES, SUMMARIES))

    @contextmanager
    def _errors_named(self, file: StepFile) -> Iterator[None]:
        from pyarrow import ArrowException

        try:
            yield
        except obstore.exceptions.BaseError as error:
            raise self._named(file, error) from error
        except (OSError, ArrowException) as error:
            if "NoSuchBucket" in str(error):
                raise StorageUnreachable from error
            if isinstance(error, FileNotFoundError):
                check_has_steps(self._store)
            raise StepsUnreadable.of(file.key, _one_line(error)) from error

    def _named(self, file: StepFile, error: Exception) -> Exception:
        """Return the error of a file whose bytes a store does not return: truncated or not."""
        try:
            size_bytes = obstore.head(self._store, file.key)["size"]
        except (OSError, obstore.exceptions.BaseError):
            return StorageUnreachable()
        if size_bytes == file.size_bytes:
            return StorageUnreachable()
        text = f"it has {size_bytes:,} bytes, not the recorded {file.size_bytes:,}"
        return StepsUnreadable.of(file.key, text)

    def _footer(self, file: StepFile) -> _Footer:
        from pyarrow import parquet  # deferred: uses 30 MiB

        with self._lock:
            if footer := self._footers.get(file.key):
                self._footers.move_to_end(file.key)
                return footer
        length = min(FOOTER_BYTES, file.size_bytes)
        end = self._read_end(file, length)
        needed = footer_bytes(end.content)
        if length < needed <= file.size_bytes:
            end = self._read_end(file, needed)
        if sha256(end.content[-needed:]).hexdigest() != file.footer_sha256:
            raise OSError("its footer is damaged")
        metadata = parquet.read_metadata(_Parts([end], file.size_bytes))
        number = int((metadata.metadata or {}).get(FORMAT_KEY, b"1"))
        if number > FORMAT:
            raise OSError(f"it has format {number}; this version reads {FORMAT}: update Halfstep")
        footer = _Footer(metadata)
        with self._lock:
            self._footers[file.key] = footer
            while len(self._footers) > MOST_FOOTERS:
                self._footers.popitem(last=False)
        return footer

    def _needed(self, file: StepFile, ranges: Collection[StepRange]) -> list[int]:
        """Return the row groups that may have steps in these ranges."""
        if not ranges:
            return []
        spans = self._footer(file).spans
        is_needed = np.zeros(len(spans), bool)
        for first, last in ranges:
            is_needed |= (spans[:, 0] <= last) & (spans[:, 1] >= first)
        groups: list[int] = np.flatnonzero(is_needed).tolist()
        return groups

    def _read_groups(
        self, file: StepFile, groups: Sequence[int], names: Collection[str]
    ) -> Iterator[Columns]:
        for _, table in self._tables(file, groups, names):
            yield {name: _as_numbers(name, table[_stored(name)]) for name in names}

    def _tables(
        self, file: StepFile, groups: Sequence[int], names: Collection[str]
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """Read columns of row groups, some groups at a time; yield these groups and their table."""
        from pyarrow import ArrowException

        for at in range(0, len(groups), MOST_GROUPS):
            some = groups[at : at + MOST_GROUPS]
            try:
                table = self._table(file, some, names)
            except (OSError, ArrowException):  # of cached bytes perhaps; the file may be restored
                self._forget(file)
                table = self._table(file, some, names)
            yield some, table

    def _table(self, file: StepFile, groups: Sequence[int], names: Collection[str]) -> Any:
        from pyarrow import parquet

        footer = self._footer(file)
        parts = self._read_parts(file, {group: footer.part(group, names) for group in groups})
        with parquet.ParquetFile(
            _Parts(list(parts.values()), file.size_bytes),
            metadata=footer.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as opened:
            columns = list(map(_stored, names))
            table = opened.read_row_groups(groups, columns=columns, use_threads=False)
        if len(table) != sum(footer.metadata.row_group(group).num_rows for group in groups):
            raise OSError("it has too few steps")
        # Intact in these columns; a column between them is verified when it is read.
        self._cache(file, parts)
        return table

    def _read_end(self, file: StepFile, length: int) -> _Part:
        start = file.size_bytes - length
        [content] = self._request(file, [(start, file.size_bytes)])
        return _Part(start, content)

    def _read_parts(self, file: StepFile, spans: dict[int, tuple[int, int]]) -> dict[int, _Part]:
        """Return bytes of row groups; concurrent requests read those that are not cached.

        spans: by row group, in order, where its bytes begin and end.
        """
        with self._lock:
            found = {group: self._parts.get((file.key, group)) for group in spans}
        parts = {group: part for group, part in found.items() if part and part.has(*spans[group])}
        if missing := [group for group in spans if group not in parts]:
            contents = self._request(file, [spans[group] for group in missing])
            for group, content in zip(missing, contents, strict=True):
                parts[group] = _Part(spans[group][0], content)
        return {group: parts[group] for group in spans}

    def _request(self, file: StepFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read parts of a file from the store, given in order, by concurrent requests."""
        merged: list[tuple[int, int]] = []
        for start, end in spans:
            if merged and start - merged[-1][1] <= GAP_BYTES:
                start, _ = merged.pop()
            merged.append((start, end))
        starts, ends = zip(*merged, strict=True)

        def get(at: int) -> Sequence[Any]:
            some = slice(at, at + REQUESTS)
            return obstore.get_ranges(
                self._store, file.key, starts=starts[some], ends=ends[some], coalesce=0
            )

        turns = range(0, len(merged), REQUESTS)
        if len(turns) == 1:
            contents = get(0)
        else:
            with ThreadPoolExecutor(MOST_GROUPS // REQUESTS + 1) as pool:
                contents = [content for some in pool.map(get, turns) for content in some]
        read = [_Part(start, bytes(each)) for start, each in zip(starts, contents, strict=True)]
        if any(not part.has(*span) for part, span in zip(read, merged, strict=True)):
            raise OSError("it is shorter than recorded")
        within = [read[bisect_right(starts, start) - 1] for start, _ in spans]
        return [
            part.content[start - part.start : end - part.start]
            for part, (start, end) in zip(within, spans, strict=True)
        ]

    def _cache(self, file: StepFile, parts: dict[int, _Part]) -> None:
        with self._lock:
            for group, part in parts.items():
                before = self._parts.pop((file.key, group), None)
                self._parts[file.key, group] = part
                self._parts_bytes += len(part.content) - (len(before.content) if before else 0)
            while self._parts_bytes > CACHED_BYTES:
                _, oldest = self._parts.popitem(last=False)
                self._parts_bytes -= len(oldest.content)

    def _forget(self, file: StepFile) -> None:
        """Remove what is cached of a file."""
        with self._lock:
            self._footers.pop(file.key, None)
            for each in [each for each in self._parts if each[0] == file.key]:
                self._parts_bytes -= len(self._parts.pop(each).content)


class CopiedSteps(StepFiles):
    """Reader of a copy of a file, which needs no store."""

    def __init__(self, copy: IO[bytes]) -> None:
        super().__init__(lambda: MemoryStore())
        self._copy = copy

    def _request(self, file: StepFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [os.pread(self._copy.fileno(), end - start, start) for start, end in spans]


#: A method of StepFiles and its arguments.
Call: TypeAlias = tuple[Any, ...]


class StepsNotRead(Exception):
    """A transaction needs steps of a file that were not read before it; `fetch` reads them."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__("db.telemetry.frozen_steps.write opens such transactions")
        self.fetch = fetch


class _NotCached(Exception):
    """Bytes of a file are not cached."""


class _CachedFiles(StepFiles):
    """A reader that shares the caches of another and reads nothing from the store."""

    def __init__(self, files: StepFiles) -> None:
        self.__dict__ = files.__dict__

    def _request(self, file: StepFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        raise _NotCached


class ReadAhead:
    """Reader for a transaction that must not wait for the store: it has what was read before.

    Otherwise raises StepsNotRead. Results stay right, as no other file ever has the key of one.
    """

    def __init__(self, files: StepFiles) -> None:
        self._files, self._cached = files, _CachedFiles(files)
        self._results: dict[Call, Any] = {}

    def _fetch(self, call: Call) -> None:
        method, *arguments = call
        try:
            self._results[call] = method(self._files, *arguments)
        except StepsUnreadable as error:
            self._results[call] = error

    def read(
        self, file: StepFile, ranges: Collection[StepRange], names: Collection[str] = NAMES
    ) -> Columns:
        """See StepFiles."""
        columns: Columns = self._result(StepFiles.read, file, tuple(ranges), tuple(sorted(names)))
        return columns

    def summaries(
        self, file: StepFile, ranges: Collection[StepRange]
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """See StepFiles."""
        found: tuple[NDArray[np.int64], list[bytes]]
        found = self._result(StepFiles.summaries, file, tuple(ranges))
        return found

    def read_ahead(self, *_arguments: object) -> None:
        """See StepFiles. Each call is read ahead by itself."""

    def read_next(self, file: StepFile, span: StepRange, most: int) -> Columns:
        """See StepFiles."""
        columns: Columns = self._result(StepFiles.read_next, file, span, most)
        return columns

    def read_last(self, file: StepFile, span: StepRange, most: int) -> Columns:
        """See StepFiles."""
        columns: Columns = self._result(StepFiles.read_last, file, span, most)
        return columns

    def ends(self, file: StepFile, span: StepRange) -> StepRange | None:
        """See StepFiles."""
        ends: StepRange | None = self._result(StepFiles.ends, file, span)
        return ends

    def _result(self, *call: Any) -> Any:
        if call not in self._results:
            method, *arguments = call
            try:
                return method(self._cached, *arguments)
            except _NotCached:
                raise StepsNotRead(partial(self._fetch, call)) from None
        result = self._results[call]
        if isinstance(result, StepsUnreadable):
            raise result
        return result


class _Parts(io.RawIOBase):
    """File of which only some parts are at hand, in order."""

    def __init__(self, parts: Sequence[_Part], size_bytes: int) -> None:
        self._parts, self._starts = parts, [part.start for part in parts]
        self._size_bytes, self._at = size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size_bytes if size < 0 else self._at + size
        part = self._parts[max(0, bisect_right(self._starts, self._at) - 1)]
        if not part.has(self._at, end):
            raise OSError(f"bytes from {self._at} on are not in this part of the file")
        content = part.content[self._at - part.start : end - part.start]
        self._at = end
        return content


def footer_bytes(end: bytes) -> int:
    """Return the length of a file's footer. end: the end of the file."""
    return 8 + int.from_bytes(end[-8:-4], "little")


def sha256_of_whole_and_footer(file: IO[bytes]) -> tuple[str, str]:
    """Return the SHA-256 of a file and of its footer."""
    file.seek(0)
    whole = file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(-8, io.SEEK_END)
    file.seek(-footer_bytes(file.read()), io.SEEK_END)
    return whole, sha256(file.read()).hexdigest()


def write(sink: IO[bytes], read_groups: Callable[[], Iterable[Columns]]) -> list["Digest"]:
    """Write a file and return the digest of each row group.

    read_groups: returns the columns of each row group in order of step. Called again if the file
    must be begun again, with eight bytes for a column that does not fit four.
    """
    short = set(SHORT)
    while True:
        sink.seek(0)
        sink.truncate()
        try:
            return _write(sink, read_groups(), short)
        except _TooShort as error:
            short.remove(str(error))


#: Number of steps of a row group, and the SHA-256 of each of its columns by name.
Digest: TypeAlias = tuple[int, dict[str, str]]


def digest(columns: Columns) -> Digest:
    """Return the number of steps and the SHA-256 of each column. All NaN are equal."""

    def of(values: NDArray[Any]) -> str:
        if values.dtype.kind == "f":
            values = np.where(np.isnan(values), np.nan, values)
        return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()

    digests = {name: of(columns[name]) for name in NAMES}
    digests[SUMMARIES] = sha256(repr(columns[SUMMARIES].tolist()).encode()).hexdigest()
    return len(columns["step"]), digests


def _write(sink: IO[bytes], groups: Iterable[Columns], short: Collection[str]) -> list[Digest]:
    import pyarrow as pa
    from pyarrow import parquet

    groups = iter(groups)
    group = next(groups, None)
    if group is None:
        return []
    kind = pa.list_(pa.binary(len(group[SUMMARIES][0])))
    types = {name: pa.int64() for name in (*WHOLE, "data_us", "lr")}
    types |= {name: pa.float32() if name in short else pa.float64() for name in SHORT}
    schema = pa.schema([(_stored(name), types[name]) for name in NAMES])
    # Next to the steps, with which they are read.
    schema = schema.insert(1, pa.field(SUMMARIES, kind))
    schema = schema.with_metadata({FORMAT_KEY: str(FORMAT).encode()})
    whole = ("step", "elapsed_ms", "step_us", "data_us", "lr_bits")
    integers = dict.fromkeys(whole, "DELTA_BINARY_PACKED")
    split = ("loss", "grad_norm", "grad_norm_clipped", f"{SUMMARIES}.list.element")
    digests = []
    with parquet.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=["scale", "flags"],
        column_encoding=integers | dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    ) as writer:
        for columns in chain([group], groups):
            arrays = [_as_array(name, columns[name], types[name], short) for name in NAMES]
            arrays.insert(1, _as_lists(columns[SUMMARIES], kind))
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=GROUP_STEPS)
            digests.append(digest(columns))
    return digests


def _as_array(name: str, values: NDArray[Any], kind: Any, short: Collection[str]) -> Any:
    import pyarrow as pa

    missing = np.isnan(values)
    if name == "data_us":
        values = np.where(missing, 0, values).astype(np.int64)
    elif name == "lr":
        values = values.astype(np.float64).view(np.int64)
    elif name in short:
        values = _shortened(name, values)
    return pa.array(values, kind, mask=missing)


def _as_lists(summaries: NDArray[Any], kind: Any) -> Any:
    import pyarrow as pa

    has_one = summaries != b""
    offsets = np.concatenate([[0], np.cumsum(has_one)]).astype(np.int32)
    values = pa.array(summaries[has_one].tolist(), kind.value_type)
    return pa.ListArray.from_arrays(offsets, values, type=kind)


def _shortened(name: str, values: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        short = values.astype(np.float32)
    if not np.array_equal(short.astype(np.float64), values, equal_nan=True):
        raise _TooShort(name)
    return short


def _stored(name: str) -> str:
    return STORED_NAMES.get(name, name)


def _as_numbers(name: str, column: Any) -> NDArray[Any]:
    values: NDArray[Any]
    if name == SUMMARIES:
        lists = column.combine_chunks()
        values = np.full(len(lists), b"", object)
        values[np.diff(lists.offsets) > 0] = np.array(lists.flatten().to_pylist(), object)
        return values
    if name == "lr":
        if column.null_count:  # imports for 0.1 s what few files need
            column = column.fill_null(NAN_BITS)
        values = column.to_numpy()
        return values.view(np.float64)
    values = column.to_numpy()
    return values.astype(np.int64 if name in WHOLE else np.float64, copy=False)


def _within(columns: Columns, ranges: Collection[StepRange]) -> Columns:
    is_within = _is_within(columns["step"], ranges)
    return {name: values[is_within] for name, values in columns.items()}


def _is_within(step: NDArray[np.int64], ranges: Collection[StepRange]) -> NDArray[np.bool_]:
    is_within = np.zeros(len(step), bool)
    for first, last in ranges:
        is_within |= (step >= first) & (step <= last)
    return is_within


def _one_line(error: Exception) -> str:
    return (
        "the file is missing"
        if isinstance(error, FileNotFoundError)
        else str(error)[:200].partition("\n")[0]
    )
