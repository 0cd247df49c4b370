"""Free space of the disk with the runs' files, if they are on this machine."""

import shutil
from dataclasses import dataclass

from db.settings import Settings

#: Pages warn below this share of free space.
LITTLE = 0.1


@dataclass(frozen=True)
class Disk:
    """Size and free space of the data folder's file system."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes in use by all files, not only those of runs."""
        return self.total_bytes - self.free_bytes

    @property
    def is_short(self) -> bool:
        """Whether pages should warn."""
        return self.free_bytes < LITTLE * self.total_bytes


def disk(settings: Settings) -> Disk | None:
    """Return the disk's state; None if files are in a bucket or the folder is not accessible."""
    if settings.storage_url:
        return None
    try:
        usage = shutil.disk_usage(settings.data)
    except OSError:
        return None
    return Disk(usage.total, usage.free)
