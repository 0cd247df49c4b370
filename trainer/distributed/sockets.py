"""Where processes that share data meet, however deep the data folder lies.

multiprocessing makes its sockets in TMPDIR, which is a folder of the run's own.
"""

import tempfile
from multiprocessing import process

from halfstep.telemetry.socket_folder import short_path


def shorten() -> None:
    """Have multiprocessing reach a TMPDIR whose path is too long by a short one, from here on."""
    folder = tempfile.gettempdir()
    if (short := short_path(folder)) != folder:
        config = process.current_process()._config  # type: ignore[attr-defined]
        config["tempdir"] = short
