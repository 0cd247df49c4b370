"""Shortens the path of multiprocessing's sockets, whatever the depth of the data folder.

multiprocessing creates its sockets in TMPDIR, which is a folder of the run.
"""

import tempfile
from multiprocessing import process

from halfstep.telemetry.socket_folder import short_path


def shorten() -> None:
    """Make multiprocessing use a short path to TMPDIR, if its path is too long for sockets."""
    folder = tempfile.gettempdir()
    if (short := short_path(folder)) != folder:
        config = process.current_process()._config  # type: ignore[attr-defined]
        config["tempdir"] = short
