"""Where processes that share data meet, however deep the data folder lies.

multiprocessing makes its sockets in TMPDIR, which is a folder of the run's own, and Linux takes at
most 107 bytes for a socket's path.
"""

import os
import tempfile
from multiprocessing import process

MOST_BYTES = 107
OWN_BYTES = len("/pymp-xxxxxxxx/listener-xxxxxxxx")


def shorten() -> None:
    """Have multiprocessing reach a TMPDIR whose path is too long by a short one, from here on.

    That goes by a descriptor of this process, which every process of its user may go by, and which
    is gone with it.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + OWN_BYTES <= MOST_BYTES:
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    config = process.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = f"/proc/{os.getpid()}/fd/{descriptor}"
