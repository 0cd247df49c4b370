"""Log files with all output of a run: parts, each compressed once complete.

    runs/<id>/log/attempt-0001-000001.txt      a part being written or not yet published,
                                               which a server on this machine reads too
                  attempt-0001-000001.txt.gz   a complete part, published as a file of the run

The database keeps a bounded number of lines for the page; these files keep all of them.
"""

import gzip
import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

from halfstep.clock import clock
from halfstep.telemetry.events import LogPart

LOG = "log/"  # folder of the parts in the run's folder
#: A part is complete at this many uncompressed bytes.
PART_BYTES = 64 * 2**20
#: Or after this time or 1/20 of the attempt's, if longer: the maximum wait on other machines.
PART_SECONDS = 300.0
#: gzip's fastest levels compress about 100 MB/s; higher ones save little of what programs print.
COMPRESSION_LEVEL = 3


class LogFile:
    """Output of one attempt. Threads may write to it; one process at a time opens it."""

    def __init__(self, folder: Path, attempt: int, node: int = 0) -> None:
        """folder: the node's; parts left there by an earlier process are complete."""
        self._folder = folder / "log"
        self._stem = f"attempt-{attempt:04}" + (f"-node-{node}" if node else "")
        self._remarks = b""  # before anything is printed
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._path = Path()  # of the open part
        self._begun_at = self._opened_at = clock()
        self._is_closed = False
        self._complete = sorted(self._folder.glob("attempt-*.txt"))
        self._missing_bytes, self._write_error = 0, ""

    def write(self, printed: bytes) -> None:
        """Add output. Bytes that a full disk rejects are counted and noted later."""
        with self._lock:
            try:
                file = self._file or self._open()
                file.write(self._remarks)
                self._remarks = b""
                if self._missing_bytes:
                    file.write(self._mark())
                    self._missing_bytes = 0
                file.write(printed)
                if file.tell() >= PART_BYTES:
                    self._end_part()
            except OSError as error:
                self._missing_bytes, self._write_error = (
                    self._missing_bytes + len(printed),
                    str(error),
                )

    def append_log(self, text: str) -> None:
        """Add a line from Halfstep; no file is created if nothing is ever printed."""
        line = f"{text}\n".encode(errors="replace")
        if self._file:
            self.write(line)
        else:
            self._remarks += line

    def flush(self) -> None:
        """Flush to the operating system, so that the data survives a killed process."""
        with self._lock:
            try:
                if self._file:
                    self._file.flush()
            except OSError as error:
                self._write_error = str(error)

    def close(self) -> None:
        """Complete the last part; anything written later is complete at once."""
        with self._lock:
            self._is_closed = True
            self._end_part()

    def complete_parts(self) -> list[Path]:
        """Return the parts that no longer grow, in order."""
        with self._lock:
            if self._is_closed or self._is_due():
                self._end_part()
            return list(self._complete)

    def take(self, part: Path) -> None:
        """Remove a complete part from the list; the caller now owns it."""
        with self._lock:
            self._complete.remove(part)

    def _is_due(self) -> bool:
        now = clock()
        patience = max(PART_SECONDS, (now - self._begun_at) / 20)
        return self._file is not None and now - self._opened_at >= patience

    def _open(self) -> BinaryIO:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        there = {path.name.partition(".")[0] for path in self._folder.glob(f"{self._stem}-[0-9]*")}
        self._path = self._folder / f"{self._stem}-{len(there) + 1:06}.txt"
        self._file = self._path.open("xb")
        self._opened_at = clock()
        return self._file

    def _end_part(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._write_error = str(error)
        self._complete.append(self._path)

    def _mark(self) -> bytes:
        return (
            f"[halfstep: {self._missing_bytes:,} bytes are missing: {self._write_error}]\n".encode()
        )


def compress(part: Path, folder: Path) -> LogPart:
    """Compress a complete part into the same folder; return its event.

    folder: the node's. The part itself stays until `forget_part`. Raises OSError.
    """
    path = part.with_name(f"{part.name}.gz")
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Without a sandbox a run can write there: a link may point anywhere.
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as source, partial.open("wb") as file:
            with gzip.GzipFile("", "wb", COMPRESSION_LEVEL, file, mtime=0) as compressed:
                shutil.copyfileobj(source, compressed, 2**20)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)  # other files need the space on a full disk
        raise
    partial.replace(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return LogPart(
        path=path.relative_to(folder).as_posix(),
        size_bytes=path.stat().st_size,
        sha256=sha256,
    )


def forget_part(path: str, folder: Path) -> None:
    """Delete a part whose compressed file is published; another file is not deleted."""
    if path.startswith(LOG):
        (folder / path.removesuffix(".gz")).unlink(missing_ok=True)
