"""Upload of a watched run, and the server that it goes to."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from halfstep.api_client import credentials, local_server
from halfstep.api_client.credentials import Credentials, Unreadable
from halfstep.clock import clock
from halfstep.session.queued_run import data_of, find_queued_files
from halfstep.session.stderr import say
from halfstep.telemetry import uploader
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.run_folder import RUNS, read_description

SERVICE = "halfstep-service"  # the package that has the command `halfstep show`
PAGE_SECONDS = 1.0  # timeout for the server to return the URL of the run's page
REVIVAL_SECONDS, REVIVALS = 30.0, 5  # between two checks of the uploader; most restarts of it


class RunUpload:
    """Upload of a run's folder by a process of its own, if a server is configured."""

    def __init__(
        self, files: AttemptFiles, server: Credentials | None, stderr: Callable[[], int | None]
    ) -> None:
        """stderr: returns the script's own, as the uploader must not keep the sidecar."""
        self._files, self._stderr = files, stderr
        self.server = server
        self._page: str | None = None  # URL of the run's page, once the server has answered
        self._looked_at = clock()
        self._revivals = 0

    @property
    def secret(self) -> str | None:
        """The server's token, which no written file may contain."""
        return self.server.token if self.server else None

    @property
    def page(self) -> str | None:
        """URL of the run's page, or until that is known one that leads to it; None offline."""
        if self._page or self.server is None:
            return self._page
        return f"{self.server.url}/runs/watched/{read_description(self._files.folder).id}"

    def start(self) -> None:
        """Start the upload if a server is configured; print the run's page or folder."""
        folder = self._files.folder
        place = f"the run is in {folder}"
        if self.server is None:
            runs = folder.parent
            command = "halfstep show" if runs == Path.cwd() / RUNS else f"halfstep show {runs}"
            upload = f"`halfstep upload {folder}` uploads it to a server"
            say(f"watching; {place}; {f'`{command}` opens it' if _can_show() else upload}")
            return
        try:
            page = uploader.start(self._files, self.server, PAGE_SECONDS, self._stderr())
        except OSError as error:
            command = f"`halfstep upload {folder}`"
            say(f"watching; {place}; {command} uploads it: the uploader cannot start: {error}")
            self.server = None
            return
        self._page = page or None
        if page is None:
            place += f", and uploaded to {self.server.url} once that answers"
        say(f"watching; {page or place}")

    @property
    def is_due(self) -> bool:
        """Whether to check the uploader."""
        return clock() - self._looked_at > REVIVAL_SECONDS

    def revive(self) -> None:
        """Restart an uploader that was killed, at most REVIVALS times."""
        self._looked_at = clock()
        if (
            self.server
            and self._revivals < REVIVALS
            and not uploader.is_uploading(self._files.folder)
        ):
            self._revivals += 1
            with suppress(OSError):  # no process can start: retried at the next check, or by hand
                uploader.start(self._files, self.server, stderr=self._stderr())


def server_of(url: str | None, token: str | None) -> Credentials | None:
    """Return the server's credentials; None if there are none or they cannot be read.

    If no server is named, it is the one that runs on this machine; for a queued run only if the run
    is in its data folder.
    """
    try:
        server = credentials.find(url, token)
    except Unreadable as error:
        say(str(error))
        return None
    is_named = url or token or {"HALFSTEP_URL", "HALFSTEP_TOKEN"} & os.environ.keys()
    if server or is_named:
        return server
    queued = find_queued_files()
    return local_server.running(data_of(queued) if queued else None)


def _can_show() -> bool:
    """Return whether the service is installed here, which has the command `halfstep show`."""
    from importlib.metadata import PackageNotFoundError, distribution  # only without a server

    try:
        distribution(SERVICE)
    except PackageNotFoundError:
        return False
    return True
