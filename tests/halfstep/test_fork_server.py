"""Processes of a fork server: their set-up, and their end."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfstep.fork_server import Forked, ForkFailed, ForkServer, Request, current_umask
from halfstep.process import lives, read_start_ticks
from tests.site import SECONDS, until

SERVER = """
import os, runpy, socket, sys, threading, time
from halfstep.fork_server import serve

def load():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)

control = socket.socket(fileno=os.dup(0))
extra = open(os.devnull)  # inherited by no process
serve(control, is_tied=True, load=load if sys.argv[1:] else None)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
#: Describes its process as far as it could differ from one that was started as a program.
DESCRIBE = """
import json, os, sys, tempfile
from pathlib import Path

def status(*names):
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(names)]

if sys.argv[1:] == ["wait"]:
    print("waits", flush=True)
    sys.stdin.read()
    import signal
    signal.pause()
links = {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) < 3}
said = {"argv": sys.argv, "environment": dict(os.environ), "folder": os.getcwd(),
        "umask": status("Umask"), "signals": status("SigBlk", "SigIgn", "SigCgt"),
        "leads": os.getsid(0) == os.getpid(), "stdin": links["0"], "threads": status("Threads"),
        "temporary": tempfile.gettempdir(), "streams": [sys.stdout.line_buffering,
        sys.stderr.line_buffering]}
print(json.dumps(said), flush=True)
print("bad", file=sys.stderr)
sys.exit(7)
"""


class Server:
    """A fork server in a process of its own, and requests to it."""

    def __init__(self, folder: Path, *words: str) -> None:
        """Start the server. words: a file for which its loading waits."""
        (folder / "server.py").write_text(SERVER)
        (folder / "script.py").write_text(DESCRIBE)
        self.folder = folder
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, str(folder / "server.py"), *words],
                env=self.environment,
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self.server = ForkServer(ours)
        if not words:
            until(lambda: self.server.is_ready)

    def fork(self, *words: str, **variables: str) -> Forked:
        """Fork a process that runs the script, with files in its folder as output and errors."""
        argv = [str(self.folder / "script.py"), *words]
        request = Request(argv, self.environment | variables, str(self.folder), current_umask())
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as errors:
            files = [out.fileno(), errors.fileno()]
            return Forked(self.server.connect(), request, files, SECONDS)

    def waiting(self, **variables: str) -> Forked:
        """Fork a process that waits to be ended."""
        forked = self.fork("wait", **variables)
        forked.begin()
        until(lambda: self.printed == "waits\n")
        return forked

    def end(self) -> None:
        self.server.close()
        self.process.kill()
        self.process.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path.cwd()),
            "TMPDIR": str(self.folder),
        }

    @property
    def printed(self) -> str:
        return (self.folder / "out").read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.end()


def wait_for_end(forked: Forked) -> int:
    until(lambda: forked.poll() is not None)
    code = forked.poll()
    assert code is not None
    return code


def set_signals() -> None:
    """Ignore SIGUSR2 as a worker does, and reset SIGINT, unlike a shell's background job."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_forked_process_is_set_up_like_a_program(server: Server) -> None:
    """A forked process has a program's arguments, environment, umask, signals and streams."""
    forked = server.fork("a", "b")
    forked.begin()
    code, said = wait_for_end(forked), json.loads(server.printed)
    errors = (server.folder / "err").read_text()
    forked.release()
    program = subprocess.run(
        [sys.executable, str(server.folder / "script.py"), "a", "b"],
        env=server.environment,
        cwd=server.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        preexec_fn=set_signals,
    )
    expected: dict[str, Any] = json.loads(program.stdout)
    for each in (said, expected):
        each["environment"].pop("LC_CTYPE", None)  # set by an interpreter as it starts
    assert said == expected
    assert (code, errors) == (program.returncode, program.stderr.decode()) == (7, "bad\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_signal_is_its_exit_code(server: Server, number: signal.Signals) -> None:
    """The client gets the signal that ended a process, which stays a zombie until then."""
    forked = server.waiting()
    os.kill(forked.pid, number)
    assert wait_for_end(forked) == -number
    assert Path(f"/proc/{forked.pid}").exists()
    forked.release()
    until(lambda: not Path(f"/proc/{forked.pid}").exists())


def test_a_process_ends_with_its_client(server: Server) -> None:
    """The kernel kills a process whose client ends, also if the server is stopped."""
    forked = server.waiting()
    since = read_start_ticks(forked.pid)
    server.process.send_signal(signal.SIGSTOP)
    forked.release()
    until(lambda: not lives(forked.pid, since))
    server.process.send_signal(signal.SIGCONT)


def test_a_process_ends_with_its_server(server: Server) -> None:
    """If the server ends, its processes end, the client is notified, and no more are forked."""
    forked = server.waiting()
    server.process.kill()
    assert wait_for_end(forked) == -signal.SIGKILL
    assert read_start_ticks(forked.pid) is None
    forked.release()
    assert not server.server.is_ready
    with pytest.raises(ForkFailed, match="is gone"):
        server.fork()


def test_a_process_that_its_client_gave_up_never_begins(server: Server) -> None:
    """A process whose client gave up never starts, since the client may have replaced it."""
    forked = server.fork()
    since = read_start_ticks(forked.pid)
    forked.release()
    until(lambda: not lives(forked.pid, since))
    assert server.printed == ""


def test_a_server_ends_with_its_starter_but_after_its_processes(server: Server) -> None:
    """A server outlives the worker that started it until its trainings have ended."""
    forked = server.waiting()
    server.server.close()
    os.kill(forked.pid, signal.SIGTERM)
    assert wait_for_end(forked) == -signal.SIGTERM
    assert server.process.poll() is None
    forked.release()
    until(lambda: server.process.poll() == 0)


def test_a_server_holds_nothing_of_a_request(server: Server) -> None:
    """Neither the server's memory nor a later process's open files have anything of an earlier
    request.
    """
    secret = "sesame-of-the-first-run"
    forked = server.waiting(SECRET=secret)
    assert secret.encode() in memory(forked.pid)
    other = server.waiting()
    for pid in (server.process.pid, other.pid):
        assert secret.encode() not in memory(pid)
    assert (
        len(list(Path(f"/proc/{other.pid}/fd").iterdir())) == 4
    )  # standard streams, and the pipe by which it is tied to its client
    forked.release()
    other.release()


def memory(pid: int) -> bytes:
    """Return all writable memory of a process."""
    parts = []
    with Path(f"/proc/{pid}/mem").open("rb") as file:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            first, _, last = line.split()[0].partition("-")
            if line.split()[1].startswith("rw") and "[v" not in line:
                file.seek(int(first, 16))
                parts.append(file.read(int(last, 16) - int(first, 16)))
    return b"".join(parts)


def test_a_signal_before_a_process_is_set_up_is_not_lost(server: Server) -> None:
    """A SIGTERM before a process is set up is not lost, although the server ignores SIGTERM."""
    forked = server.fork("wait")
    os.kill(forked.pid, signal.SIGTERM)
    forked.begin()
    assert wait_for_end(forked) == -signal.SIGTERM
    forked.release()


def test_a_server_that_loads_forks_for_earlier_requests_first(tmp_path: Path) -> None:
    """A fork server that is still loading serves earlier requests, while later ones wait."""
    loaded = tmp_path / "loaded"
    server = Server(tmp_path, str(loaded))
    early = server.fork()
    assert not early.wait_for_end(0)
    early.begin()
    assert early.wait_for_end(SECONDS)
    assert (early.poll(), server.server.is_ready) == (None, False)
    loaded.touch()
    later = server.fork()
    later.begin()
    assert wait_for_end(later) == wait_for_end(early) == 7
    assert server.server.is_ready
    for each in (early, later):
        each.release()
    server.end()
    assert early.wait_for_end(0)


def test_a_request_that_is_too_long_costs_no_other(server: Server) -> None:
    """A request above the socket's message limit is rejected, and the next one is served."""
    with pytest.raises(ForkFailed, match="Message too long"):
        server.fork(LONG="x" * 2**22)
    assert server.server.is_ready
    server.waiting().release()
