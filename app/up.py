"""`halfstep up`: the server and a worker of one machine.

The worker is forked before the server's modules are loaded, so that it loads torch meanwhile. It
touches neither database nor files until the database is migrated and the port is bound.
"""

import multiprocessing
import os
import signal
import sys
from contextlib import suppress

import typer

from app.command_classes import server_command
from app.server_address import check_unused
from db.settings import Settings
from halfstep.cli import main as cli
from halfstep.cli.output import say
from halfstep.process import close_to_others, end_with_parent, loading_modules, on_signals


@server_command
def up() -> None:
    """Start server and worker on this machine, and print a sign-in link."""
    close_to_others()
    # Invalid ones, or a second start, are reported once, and not by the worker, too.
    check_unused(Settings.read())
    start_read, start_write = os.pipe()
    # Killed with this process, to release its name for the next worker, which continues its runs.
    worker = multiprocessing.get_context("fork").Process(
        target=_work, args=(start_read, start_write)
    )
    has_begun = False
    try:
        worker.start()
        assert worker.pid is not None  # noqa: S101 - it has been started
        on_signals(_exit)  # now, or the worker would begin with this handler
        os.close(start_read)
        with loading_modules():
            from app import commands, server_of_up  # takes a second

        installation = commands.prepare()
        with suppress(BrokenPipeError):  # it has ended, as the server reports
            os.write(start_write, b"\n")
        os.close(start_write)
        has_begun = True
        server_of_up.serve(installation, worker.pid)
    finally:
        if not has_begun:
            os.close(start_write)  # a worker that waits for its start ends
        if worker.is_alive():
            worker.terminate()
            if has_begun:
                say("Stopping: runs save a checkpoint and continue from it at the next start.")
        if worker.pid is not None:
            worker.join()
    # A worker that is stopped during its start is killed by our signal, and has no runs yet.
    if worker.exitcode not in (0, -signal.SIGTERM):
        raise typer.Exit(1)


def _work(start_read: int, start_write: int) -> None:
    """Be the worker, in a session of its own: a Ctrl-C reaches it only once, from its parent."""
    os.setsid()
    end_with_parent()
    on_signals(signal.SIG_DFL)
    os.close(start_write)
    if start_read:  # 0 if standard input was closed
        os.dup2(start_read, 0)
        os.close(start_read)
    cli.main(["worker", "--wait-for-start"])


def _exit(*_signal: object) -> None:
    """Exit on the first signal; later ones do not end the wait for the worker."""
    on_signals(lambda *_signal: None)
    sys.exit()
