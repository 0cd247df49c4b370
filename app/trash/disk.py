"""How full the disk is that holds the runs' files, if it is this machine's."""

import shutil
from dataclasses import dataclass

from db.settings import Settings

#: With less of it free, pages warn.
LITTLE = 0.1


@dataclass(frozen=True)
class Disk:
    """Bytes of the file system that the data folder is on."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """What everybody has on it, not the runs alone."""
        return self.total_bytes - self.free_bytes

    @property
    def is_short(self) -> bool:
        """Whether it should be told."""
        return self.free_bytes < LITTLE * self.total_bytes


def disk(settings: Settings) -> Disk | None:
    """Look; None where a bucket has the files, or the folder does not answer."""
    if settings.storage_url:
        return None
    try:
        usage = shutil.disk_usage(settings.data)
    except OSError:
        return None
    return Disk(usage.total, usage.free)
