"""Fork server: a process with its modules loaded that forks a process for each request.

A forked process starts in milliseconds and is set up like one that was started by a command:
session, standard streams, signal handlers, environment, working folder, umask. It inherits no open
file, and nothing of an earlier request: the server never reads one, the forked process does.

Clients and server share sockets without a name, since Landlock does not restrict connections to
named ones: a sandboxed program could have processes forked outside of its sandbox. Each client has
a socket of its own, for one request, the process id, and later the exit code.

A process begins only once its client has confirmed it through a pipe. If the server ties processes
to their clients, the kernel kills one when the other end of its pipe is closed, as it is when the
client dies.
"""

import fcntl
import gc
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from halfstep.process import end_with_parent, read_start_ticks

#: How long to wait for a fork, which takes 10 ms for 300 MiB on a quiet machine.
REPLY_SECONDS = 10.0
POLL_SECONDS, WAIT_SECONDS = 0.1, 0.01
REQUEST_BYTES, MOST_FILES = 2**20, 8
#: Messages: a socket follows; the server has loaded its modules; the process may begin.
CONNECT, READY, BEGIN = b"c", b"r", b"b"
#: Signals that a forked process handles, and its server ignores.
HANDLED = (signal.SIGTERM, signal.SIGINT)
F_SETSIG = 10  # asm-generic/fcntl.h


class Request(msgspec.Struct, frozen=True):
    """Process to fork."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    umask: int


class Begun(NamedTuple):
    """Request of this process, which has been forked."""

    request: Request
    files: list[int]  # further open files of the request
    server: int  # process id of the server


class ForkFailed(Exception):
    """No process was forked, and none will begin for this request."""


class ForkServer:
    """A running fork server, for the process that started it."""

    def __init__(self, control: socket.socket, pid: int | None = None) -> None:
        """control: its other end is the server's.  pid: of the server, if `start` forked it."""
        self._control, self._pid = control, pid
        self._control.setblocking(False)
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether the server has loaded its modules and is alive."""
        try:
            self._is_ready = self._control.recv(1) == READY
        except BlockingIOError:
            pass
        except OSError:
            self._is_ready = False
        return self._is_ready

    def connect(self) -> socket.socket:
        """Return the socket of a new client. Raises ForkFailed."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with its:
                socket.send_fds(self._control, [CONNECT], [its.fileno()])
        except OSError as error:
            ours.close()
            raise ForkFailed(f"the fork server is gone: {error}") from error
        return ours

    def close(self) -> None:
        """Let the server end, after the processes that it ties to clients."""
        self._control.close()
        if self._pid is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


class Forked:
    """A forked process, for its client; its methods are those of subprocess.Popen."""

    def __init__(
        self,
        client: socket.socket,
        request: Request,
        files: Sequence[int],
        patience: float = REPLY_SECONDS,
    ) -> None:
        """Have it forked; it waits for `begin`. Raises ForkFailed.

        files: its standard output and error, then further open files.
        patience: seconds to wait for the fork.
        """
        self._client = client
        self._exit_code: int | None = None
        life, self._life = os.pipe()
        try:
            client.settimeout(patience)
            socket.send_fds(client, [msgspec.json.encode(request)], [life, *files])
            self.pid = int(client.recv(REQUEST_BYTES))
            self._started = read_start_ticks(self.pid)
            client.setblocking(False)
        except (OSError, ValueError) as error:
            self.release()  # if it is forked later, it ends at once
            raise ForkFailed(f"the fork server does not respond: {error!r}") from error
        finally:
            os.close(life)

    def begin(self) -> None:
        """Let the process begin. Raises ForkFailed."""
        try:
            os.write(self._life, BEGIN)
        except OSError as error:
            self.release()
            raise ForkFailed(f"the forked process is gone: {error}") from error

    def release(self) -> None:
        """Let go of the process: one that is tied to its client ends."""
        os.close(self._life)
        self._client.close()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self._exit_code is None:
            try:
                code = self._client.recv(REQUEST_BYTES)
            except BlockingIOError:
                return None
            except OSError:  # the server ended with something unread
                code = b""
            if code:
                self._exit_code = int(code)
            elif self._started != read_start_ticks(self.pid):  # it was killed with its server
                self._exit_code = -signal.SIGKILL
        return self._exit_code

    def wait(self) -> int:
        """Wait for the exit code."""
        while (code := self.poll()) is None:
            is_readable = bool(select.select([self._client], [], [], POLL_SECONDS)[0])
            if is_readable and self.poll() is None:  # the server is gone, the process not yet
                time.sleep(WAIT_SECONDS)
        return code

    def wait_for_end(self, seconds: float) -> bool:
        """Return whether it ends within this time; a server that is loading has no exit code."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            is_same = self._started == read_start_ticks(self.pid)
            return not is_same or bool(select.select([process], [], [], seconds)[0])
        finally:
            os.close(process)

    def terminate(self) -> None:
        """Send SIGTERM, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def current_umask() -> int:
    """Return this process's umask, without changing it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def start(
    run: Callable[[Begun], NoReturn], title: str, close_files: Callable[[], None]
) -> ForkServer:
    """Fork a server from this process, which must have one thread only.

    title: its name in lists of processes.
    close_files: called in the server; closes open files of this process.
    run: called in each forked process. These outlive their client and the server.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        try:
            _set_title(title)
            end_with_parent()  # unlike the processes that it forks
            ours.close()
            close_files()
            run(serve(its, is_tied=False))
        finally:
            os._exit(1)
    its.close()
    return ForkServer(ours, pid)


def serve(
    control: socket.socket, *, is_tied: bool, load: Callable[[], None] | None = None
) -> Begun:
    """Fork for each request; return in the forked process only.

    This process exits when the other end of `control` is closed; before, the processes end that it
    ties to their clients. It must have one thread only.

    load: loads further modules, after the requests that have already come.
    """
    for number in (*HANDLED, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole group
    own = os.getpid()
    server = _Server(control, is_tied=is_tied)
    client = server.handle_waiting() if load else None
    if client is None:
        if load:
            load()
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy all of it
        with suppress(BrokenPipeError):  # its starter has ended, unlike a forked process
            control.send(READY)
        client = server.run()
    message, files, _flags, _sender = socket.recv_fds(client, REQUEST_BYTES, MOST_FILES)
    client.close()
    life, output, errors, *files = files
    if os.read(life, 1) != BEGIN:
        os._exit(1)
    if is_tied:
        _tie(life, own)
    _set_up(request := msgspec.json.decode(message, type=Request), output, errors)
    for file in [output, errors, *([] if is_tied else [life])]:
        os.close(file)
    for file in files:
        os.set_inheritable(file, False)
    return Begun(request, files, own)


def _tie(life: int, server: int) -> None:
    """Have the kernel kill this process when its client or the server ends."""
    os.set_inheritable(life, False)
    fcntl.fcntl(life, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    end_with_parent()
    # Either may have ended before these lines.
    closed = select.poll()
    closed.register(life, select.POLLHUP)
    if closed.poll(0) or os.getppid() != server:
        os._exit(1)


def _set_up(request: Request, output: int, errors: int) -> None:
    """Set this process up like one that was started by a command."""
    _set_title(f"{sys.executable} -m {' '.join(request.argv)}")  # before the environment changes
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, output, errors)):
        os.dup2(file, number)
    os.close(null)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    os.umask(request.umask)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # it depends on TMPDIR
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    sys.argv = request.argv


def _set_title(title: str) -> None:
    """Name this process in lists of processes, if the library for that has been loaded."""
    if titles := sys.modules.get("setproctitle"):
        titles.setproctitle(title)


@dataclass
class _Child:
    """A forked process, for its server. It keeps its process id while its client may signal it."""

    pid: int
    client: int | None  # socket; None once the client has let go
    has_ended: bool = False


class _Server:
    """Loop of a fork server. Its files are numbers: no object may close them a second time."""

    def __init__(self, control: socket.socket, *, is_tied: bool) -> None:
        self._control, self._is_tied = control, is_tied
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], bool]] = {}
        self._children = 0
        self._has_starter = True
        self._watch(control.fileno(), self._accept)

    def run(self) -> socket.socket:
        """Handle events; return the client's socket in a forked process."""
        while self._has_starter or (self._is_tied and self._children):
            if client := self._handle(self._poll.poll(maxevents=1)):
                return client
        os._exit(0)

    def handle_waiting(self) -> socket.socket | None:
        """Handle events until there are none; return the client's socket in a forked process."""
        while events := self._poll.poll(0, maxevents=1):
            if client := self._handle(events):
                return client
        return None

    def _handle(self, events: list[tuple[int, int]]) -> socket.socket | None:
        """Handle one event at a time: a handler may close the file of another."""
        [(file, flags)] = events
        return self._keep_only(file) if self._handlers[file](flags) else None

    def _watch(self, file: int, handler: Callable[[int], bool]) -> None:
        self._poll.register(file, select.EPOLLIN)
        self._handlers[file] = handler

    def _close(self, file: int) -> None:
        self._poll.unregister(file)
        del self._handlers[file]
        os.close(file)

    def _accept(self, _events: int) -> bool:
        try:
            _message, files, _flags, _sender = socket.recv_fds(self._control, 1, 1)
        except ConnectionResetError:  # the starter ended without having read READY
            files = []
        for file in files:
            self._watch(file, partial(self._fork, file))
        if not files:
            self._poll.unregister(self._control)
            self._has_starter = False
        return False

    def _fork(self, client: int, events: int) -> bool:
        """Fork for the request of a client; return True in the forked process."""
        if events & select.EPOLLHUP:
            self._close(client)
            return False
        # Until it is set up a forked process ignores them as its server does; blocked, they wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
        except OSError:  # of memory or processes; the client has another way
            pid = None
        if pid == 0:
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if pid is None:
            self._close(client)
            return False
        self._children += 1
        child = _Child(pid, client)
        # The forked process reads the request; here only a hang-up is reported.
        self._poll.modify(client, 0)
        self._handlers[client] = partial(self._let_go, child)
        process = os.pidfd_open(pid)
        self._watch(process, partial(self._note_end, child, process))
        _send(client, pid)
        return False

    def _let_go(self, child: _Child, _events: int) -> bool:
        """Handle the end of a client."""
        if child.client is not None:
            self._close(child.client)
            child.client = None
        if self._is_tied:
            os.kill(child.pid, signal.SIGKILL)
        self._reap(child)
        return False

    def _note_end(self, child: _Child, process: int, _events: int) -> bool:
        """Report the exit code of a process to its client."""
        self._close(process)
        child.has_ended = True
        if child.client is not None:
            _send(child.client, _exit_code(child.pid))
        self._reap(child)
        return False

    def _reap(self, child: _Child) -> None:
        if child.has_ended and child.client is None:
            os.waitpid(child.pid, 0)
            self._children -= 1

    def _keep_only(self, client: int) -> socket.socket:
        """Close every other file; return the client's socket."""
        self._control.close()
        self._poll.close()
        for file in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
            if file > 2 and file != client:
                with suppress(OSError):  # the one that lists them
                    os.close(file)
        return socket.socket(fileno=client)


def _exit_code(pid: int) -> int:
    """Return the exit code of a process that has ended, negative for a signal; do not reap it."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if status is None or status.si_code == os.CLD_EXITED:
        return status.si_status if status else 0
    return -status.si_status


def _send(client: int, number: int) -> None:
    with suppress(OSError):  # its end is reported by another event
        os.write(client, b"%d" % number)
