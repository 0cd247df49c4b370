"""The server that `halfstep up` runs: it stops with the worker, and local scripts find it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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


def serve(installation: commands.Installation, worker_pid: int) -> None:
    """Serve until a signal, or until the worker ends; not at all if it already has."""
    server = commands.make_server(installation.settings, installation.database)
    if _report_end(worker_pid, server, os.WNOHANG):
        return
    commands.handle_signals(server)
    threading.Thread(target=_stop_with, args=(worker_pid, server), daemon=True).start()
    with _found_by_scripts(installation.settings, installation.database):
        commands.serve(server, installation)


def _stop_with(worker_pid: int, server: "Server") -> None:
    """Stop the server when the worker ends."""
    with suppress(ChildProcessError):  # the main thread has just read its exit code
        _report_end(worker_pid, server)
    server.should_exit = True


def _report_end(worker_pid: int, server: "Server", options: int = 0) -> bool:
    """Wait for the worker's end and report it; its exit code is left to the main thread.

    Returns False if it has not ended, with os.WNOHANG among the options.
    """
    ended = os.waitid(os.P_PID, worker_pid, os.WEXITED | os.WNOWAIT | options)
    if ended is None:
        return False
    if not server.should_exit:
        how = f"exited with {ended.si_status}"
        if ended.si_code != os.CLD_EXITED:
            how = f"was killed by {signal.Signals(ended.si_status).name}"
        say(f"The worker {how}, so the server stops too. Runs continue when it is started again.")
    return True


@contextmanager
def _found_by_scripts(settings: Settings, database: Database) -> Iterator[None]:
    """Let watched scripts of this user find the server without a token."""
    with ExitStack() as stack:
        if settings.local_scripts:
            try:
                token = _token_of_scripts(settings, database)
                url = commands.local_address(settings)
                stack.enter_context(local_server.announce(settings.data, url, token))
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
