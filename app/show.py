"""`halfstep show`: watched runs of a folder in the browser, without a worker or an account.

A server with a temporary database sends itself the runs, again and again while they grow. The link
signs in a user who may only view. Nothing is written into the folder.
"""

import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
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
from halfstep.telemetry.sender import RunSending
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
        server.app.state.shows_folder = True
        handle_signals(server)
        with database.writing() as session:
            viewer = accounts.make_user(session, "viewer")
            link = sign_in_link(
                settings, accounts.make_link_token(session, viewer, is_lasting=True)
            )
            owner = accounts.make_user(session, "halfstep show", is_admin=True)
            token, _row = accounts.make_api_token(session, owner, "show", WRITE)
        credentials = Credentials(f"http://{HOST}:{settings.port}", token)
        with Mirror(folder, credentials, database, viewer.id).following():
            runs = "1 run" if count == 1 else f"{count} runs"
            text = f"\n  {runs} of {folder}: {link}\n\n  Read-only. Ctrl-C ends it.\n"
            print_result({"link": link}, text, as_json=False)
            if opens and any(os.environ.get(display) for display in DISPLAYS):
                webbrowser.open(link)
            server.run(sockets=[listening])


def _settings(data: Path, port: int) -> Settings:
    """Return settings of a server of its own, whatever the environment says of another one."""
    own = {"database_url": "", "storage_url": "", "public_url": "", "oidc_issuer": ""}
    return Settings(data=data, host=HOST, port=port, **own)  # type: ignore[arg-type]


class Mirror:
    """Sends the server the data of a folder's runs that it lacks."""

    def __init__(
        self, folder: Path, server: Credentials, database: Database, viewer_id: int
    ) -> None:
        self._folder, self._server = folder, server
        self._database, self._viewer_id = database, viewer_id
        self._sendings: dict[Path, RunSending] = {}
        self._complaints: set[str] = set()
        self._stopping = threading.Event()

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
                    for folder in run_folders(self._folder):
                        if not self._stopping.is_set():
                            self._send(folder, ingest)
                    self._let_view()
                except Exception as error:  # a folder or database that is away; tried again
                    self._complain(f"{self._folder}: {type(error).__name__}: {error}")
                self._stopping.wait(POLL_SECONDS)

    def _send(self, folder: Path, ingest: Ingest) -> None:
        sending = self._sendings.get(folder) or RunSending(
            folder, ingest, self._complain, remembers=False, sidecar_seconds=0.0
        )
        self._sendings[folder] = sending
        try:
            sending.send()
        except ApiError as error:
            if error.status:  # 0: the server is about to start, or stops
                self._complain(f"{folder}: {error}")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._complain(f"{folder} cannot be read: {error}")

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
