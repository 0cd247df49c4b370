"""Parts of a run's log that are still being written on this machine.

Links in a run's folder are not followed: runs of earlier versions could make them.
"""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from db.files.artifacts import LOG
from db.settings import Settings
from halfstep import untrusted_files

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

    def compress(self) -> Iterator[bytes]:
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
    folder = settings.run_folder(run_id)
    parts: list[LivePart] = []
    with suppress(OSError):
        nodes = filter(NODE.fullmatch, untrusted_files.names(folder))
        for log in ("log", *(f"{node}/log" for node in nodes)):
            with suppress(OSError):
                parts += _parts(folder, log)
    return sorted(parts, key=lambda part: part.name)


def _parts(folder: Path, log: str) -> Iterator[LivePart]:
    """Open the parts in a log folder."""
    for name in filter(PART.fullmatch, untrusted_files.names(folder, log)):
        with suppress(OSError):
            file = untrusted_files.open_file(folder, f"{log}/{name}")
            yield LivePart(f"{LOG}{name}.gz", file, os.fstat(file.fileno()).st_size)
