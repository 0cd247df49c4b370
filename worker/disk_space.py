"""Free space of the disk that holds the data folder."""

import shutil

from db.settings import Settings
from halfstep.number_formats import size


def shortage(settings: Settings) -> str | None:
    """Return a warning if the disk of the data folder has less space than is reserved."""
    reserve = settings.reserve_disk_gb * 1e9
    try:
        free = shutil.disk_usage(settings.data).free
    except OSError:  # a folder or mount that is gone is reported where it is used
        return None
    if free >= reserve:
        return None
    return (
        f"the disk that holds {settings.data} has {size(free)} free, less than "
        f"HALFSTEP_RESERVE_DISK_GB={settings.reserve_disk_gb:g}: free space, or runs pause once it "
        "is full"
    )
