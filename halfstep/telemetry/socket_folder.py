"""A short path to a folder for Unix sockets: Linux takes at most 107 bytes for a socket's path."""

import os

MOST_BYTES = 107
#: The longest that is added: by multiprocessing, and by torch's manager of shared memory.
ADDED_BYTES = max(
    len("/pymp-xxxxxxxx/listener-xxxxxxxx"), len("/torch-shm-dir-XXXXXX/manager.sock")
)


def short_path(folder: str) -> str:
    """Return the folder's path, or if that is too long one by a descriptor of this process.

    Every process of its user can go by that; it is gone with this process.
    """
    if len(os.fsencode(folder)) + ADDED_BYTES <= MOST_BYTES:
        return folder
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
