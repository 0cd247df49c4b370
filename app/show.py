"""`halfstep show`: watched runs of a folder in the browser, without a worker or an account.

A server with a temporary database sends itself the runs, again and again while they grow. The link
signs in a user who may only view. Nothing is written into the folder.
"""

import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from app.command_classes import server_command
from app.commands import handle_signals, make_server, sign_in_link
from db.access import accounts, projects
from db.access.permissions import VIEWER
from db.database import Database, open_database
from db.settings import Settings
from db.tables import WRITE, User
from halfstep.api_client.credentials import Credentials
from halfstep.api_client.errors import ApiError
from halfstep.cli.output import print_result, say
from halfstep.process import close_to_others
from halfstep.telemetry.ingest import Ingest
from halfstep.telemetry.run_folder import read_run
from halfstep.telemetry.sender import RunSending, describe
from halfstep.telemetry.spool import spool_files
from halfstep.telemetry.upload import run_folders

HOST = "127.0.0.1"
POLL_SECONDS = 1.0
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


@server_command
def show(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of runs, or a parent folder")
    ] = Path("halfstep-runs"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one")
    ] = 0,
    opens: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser")
    ] = True,
) -> None:
    """Show watched runs of a folder in the browser, read-only: no server, worker or account."""
    close_to_others()
    folder = folder.absolute()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder")
    count = len(run_folders(folder))
    if not count:
        raise typer.BadParameter(f"there is no run in {folder}")
    with socket.socket() as listening, tempfile.TemporaryDirectory(prefix="halfstep-") as data:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
            listening.listen()  # the browser may be there before the server
        except OSError as error:
            raise typer.BadParameter(f"cannot listen on port {port}: {error.strerror}") from error
        settings = _settings(Path(data), listening.getsockname()[1])
        database = open_database(settings)
        database.migrate()
        server = make_server(settings, database)
        handle_signals(server)
        with database.writing() as session:
            viewer = accounts.make_user(session, "viewer")
            link = sign_in_link(
                settings, accounts.make_link_token(session, viewer, is_lasting=True)
            )
            owner = accounts.make_user(session, "halfstep show", is_admin=True)
            token, _row = accounts.make_api_token(session, owner, "show", WRITE)
        credentials = Credentials(f"http://{HOST}:{settings.port}", token)
        mirror = server.app.state.shown_folder = Mirror(folder, credentials, database, viewer.id)
        with mirror.following():
            text = f"\n  {_count(count)} of {folder}: {link}\n\n  Read-only. Ctrl-C ends it.\n"
            print_result({"link": link}, text, as_json=False)
            if opens and any(os.environ.get(display) for display in DISPLAYS):
                webbrowser.open(link)
            server.run(sockets=[listening])


def _settings(data: Path, port: int) -> Settings:
    """Return settings of a server of its own, whatever the environment says of another one."""
    own = {"database_url": "", "storage_url": "", "public_url": "", "oidc_issuer": ""}
    return Settings(data=data, host=HOST, port=port, **own)  # type: ignore[arg-type]


def _spool_bytes(folder: Path) -> int:
    """Return the size of a run's spool; 0 if it cannot be read."""
    try:
        return sum(path.stat().st_size for path in spool_files(folder / "spool"))
    except OSError:
        return 0


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


class Mirror:
    """Sends the server the data of a folder's runs that it lacks."""

    def __init__(
        self, folder: Path, server: Credentials, database: Database, viewer_id: int
    ) -> None:
        self._folder, self._server = folder, server
        self._database, self._viewer_id = database, viewer_id
        self._runs = run_folders(folder)
        self._sendings: dict[Path, RunSending] = {}
        self._read: set[Path] = set()  # runs that have been read to their end once
        self._complaints: set[str] = set()
        self._stopping = threading.Event()

    @property
    def progress(self) -> str:
        """Which runs are being read, and how many have been; "" if all have been."""
        read = len(self._read.intersection(self._runs))
        if read == len(self._runs):
            return ""
        done = "1 is complete" if read == 1 else f"{read} are complete"
        return f"{_count(len(self._runs))} of {self._folder}: {done}"

    @contextmanager
    def following(self) -> Iterator[None]:
        """Send in a thread."""
        thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    def _follow(self) -> None:
        with Ingest(self._server) as ingest:
            while not self._stopping.is_set():
                try:
                    self._runs = run_folders(self._folder)
                    self._send_all(ingest)
                except Exception as error:  # a folder or database that is away; tried again
                    self._complain(f"{self._folder}: {type(error).__name__}: {error}")
                self._stopping.wait(POLL_SECONDS)

    def _send_all(self, ingest: Ingest) -> None:
        """List new runs by their start, then send what they hold, small ones first."""
        new = [folder for folder in self._runs if folder not in self._sendings]
        for folder in new:
            self._try(folder, partial(self._list, folder, ingest))
        if new:
            self._let_view()
        unread = [folder for folder in self._runs if folder not in self._read]
        for folder in (*sorted(unread, key=_spool_bytes), *self._read.intersection(self._runs)):
            self._try(folder, partial(self._send, folder))

    def _list(self, folder: Path, ingest: Ingest) -> None:
        ingest.open(describe(folder, read_run(folder).attempts[0].attempt))
        self._sendings[folder] = RunSending(
            folder, ingest, self._complain, remembers=False, sidecar_seconds=0.0
        )

    def _send(self, folder: Path) -> None:
        if sending := self._sendings.get(folder):
            sending.send()
            self._read.add(folder)

    def _try(self, folder: Path, action: Callable[[], None]) -> None:
        if self._stopping.is_set():
            return
        try:
            action()
        except ApiError as error:
            if not error.status:  # the server is about to start, or stops
                return
            self._complain(f"{folder}: {error}")
            self._read.add(folder)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._complain(f"{folder} cannot be read: {error}")
            self._read.add(folder)

    def _let_view(self) -> None:
        """Let the viewer see the projects of all runs."""
        with self._database.writing() as session:
            viewer = session.get_one(User, self._viewer_id)
            known = projects.memberships(session, viewer)
            for project in projects.list_projects(session):
                if project.name not in known:
                    projects.set_role(session, viewer, project.name, VIEWER)

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            say(text)
