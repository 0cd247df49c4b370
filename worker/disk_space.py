"""Free space of the disk that holds the data folder."""

import logging
import shutil

from db.settings import Settings
from halfstep.number_formats import size

logger = logging.getLogger(__name__)


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


class DiskSpace:
    """The disk of a worker's data folder, whose shortage is logged once."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._was_short = settings, False

    def is_short(self) -> bool:
        """Return whether no run is to start, because less space is free than is reserved."""
        text = shortage(self._settings)
        if text and not self._was_short:
            logger.warning("starts no run: %s", text)
        self._was_short = text is not None
        return self._was_short
