"""The server that `halfstep up` runs: it stops with the worker, and local scripts find it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from app import commands
from db.access import accounts, audit
from db.database import Database
from db.errors import Invalid
from db.settings import Settings
from db.tables import WRITE
from halfstep.api_client import local_server
from halfstep.cli.output import say

if TYPE_CHECKING:
    from app.serve import Server

LOCAL_SCRIPTS = "scripts on this machine"  # name of their token


def serve(installation: commands.Installation, worker: BaseProcess) -> None:
    """Serve until a signal, or until the worker ends, which has been started."""
    server = commands.make_server(installation.settings, installation.database)
    commands.handle_signals(server)
    threading.Thread(target=_stop_with, args=(worker, server), daemon=True).start()
    with _found_by_scripts(installation.settings, installation.database):
        commands.serve(server, installation)


def _stop_with(worker: BaseProcess, server: "Server") -> None:
    """Stop the server when the worker ends, and leave its exit code to the main thread."""
    with suppress(ChildProcessError):  # the main thread has just read it
        ended = os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and not server.should_exit:
            how = f"exited with {ended.si_status}"
            if ended.si_code != os.CLD_EXITED:
                how = f"was killed by {signal.Signals(ended.si_status).name}"
            say(f"The worker {how}, so the server stops too. Runs continue at the next start.")
    server.should_exit = True


@contextmanager
def _found_by_scripts(settings: Settings, database: Database) -> Iterator[None]:
    """Let watched scripts of this user find the server without a token."""
    with ExitStack() as stack:
        if settings.local_scripts:
            try:
                token = _token_of_scripts(settings, database)
                url = commands.local_address(settings)
                stack.enter_context(local_server.announced(settings.data, url, token))
            except (OSError, RuntimeError, Invalid) as error:  # RuntimeError: no home folder
                say(f"Scripts on this machine need a token: {error}")
        yield


def _token_of_scripts(settings: Settings, database: Database) -> str:
    """Return the token of the last start, or a new one. Raises Invalid."""
    token = local_server.token_of(settings.data)
    with database.writing() as session:
        known = accounts.find_api_token(session, token) if token else None
        if token and known and known.kind == WRITE:
            return token
        user = accounts.first_admin(session) or commands.named(session, commands.OPERATOR)
        token, _row = accounts.make_api_token(session, user, LOCAL_SCRIPTS, WRITE, days=None)
        audit.note_typed(session, "up", f"token for {LOCAL_SCRIPTS}")
    return token
