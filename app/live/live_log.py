"""Parts of a run's log that are still being written on this machine.

A run can write to its folder, so links in it are never followed.
"""

import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from db.files.artifacts import LOG
from db.settings import Settings

PART = re.compile(r"attempt-[0-9]{4,10}(-node-[0-9]{1,6})?-[0-9]{6,10}\.txt")
NODE = re.compile(r"node-[0-9]{1,6}")
#: Bytes per read.
CHUNK_BYTES = 1 << 20
GZIP = 31  # zlib's number for a whole member of gzip


@dataclass(frozen=True)
class LivePart:
    """An open part of the log."""

    name: str  # of its artifact once the part is complete
    file: BinaryIO
    size: int  # when it was opened; later lines are not read

    def compressed(self) -> Iterator[bytes]:
        """Yield the part as one member of gzip, and close it."""
        with self.file:
            packer = zlib.compressobj(1, wbits=GZIP)
            left = self.size
            while left and (chunk := self.file.read(min(left, CHUNK_BYTES))):
                left -= len(chunk)
                yield packer.compress(chunk)
            yield packer.flush()


def live_parts(settings: Settings, run_id: int) -> list[LivePart]:
    """Open the uncompressed parts on this machine, in the order of printing."""
    parts: list[LivePart] = []
    with suppress(OSError), _Folder(str(settings.run_folder(run_id))) as run:
        nodes = [name for name in run.names() if NODE.fullmatch(name)]
        for node in (None, *nodes):
            with suppress(OSError):
                parts += _parts(run, node)
    return sorted(parts, key=lambda part: part.name)


def _parts(run: "_Folder", node: str | None) -> list[LivePart]:
    """Open the parts in the log folder of a run, or of one of its nodes."""
    if node is not None:
        with _Folder(node, run) as folder:
            return _parts(folder, None)
    parts = []
    with _Folder("log", run) as folder:
        for name in filter(PART.fullmatch, folder.names()):
            with suppress(OSError):
                file = folder.open(name)
                parts.append(LivePart(f"{LOG}{name}.gz", file, os.fstat(file.fileno()).st_size))
    return parts


class _Folder:
    """An open folder that is not a link."""

    def __init__(self, name: str, above: "_Folder | None" = None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        self._descriptor: int = os.open(name, flags, dir_fd=above._descriptor if above else None)

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def names(self) -> list[str]:
        """Return the names of its entries."""
        return os.listdir(self._descriptor)  # noqa: PTH208 - it has no path

    def open(self, name: str) -> BinaryIO:
        """Open a regular file in it. Raises OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a regular file")
        return os.fdopen(descriptor, "rb")
