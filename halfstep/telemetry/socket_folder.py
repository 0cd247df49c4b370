"""A short path to a folder for Unix sockets: on Linux a socket's path has at most 107 bytes."""

import os

MOST_BYTES = 107
#: Longest suffix that multiprocessing or torch's shared-memory manager appends to the folder.
ADDED_BYTES = max(
    len("/pymp-xxxxxxxx/listener-xxxxxxxx"), len("/torch-shm-dir-XXXXXX/manager.sock")
)


def short_path(folder: str) -> str:
    """Return the folder's path, or if it is too long a path through a descriptor of this process.

    The latter is valid for all processes of the same user until this process exits.
    """
    if len(os.fsencode(folder)) + ADDED_BYTES <= MOST_BYTES:
        return folder
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
