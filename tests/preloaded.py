"""Interpreters that have imported torch already, for tests of how a script ends.

Processes that tests.warm forks end by os._exit. Here a fork returns into its interpreter's own
main: exceptions, exit codes, exit hooks and finalization are those of an interpreter that was
started for the script. HALFSTEP_COLD=yes starts one for each.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.warm import handle_signals

ROOT = Path(__file__).parent.parent
#: What scripts load: torch._dynamo by the first call of an optimizer.
MODULES = ("torch", "torch._dynamo", "halfstep", "halfstep.session.run_start")
REQUEST_BYTES = 2**17


def run(
    args: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a script, as a file or with -c; return its exit code and output."""
    if os.environ.get("HALFSTEP_COLD") == "yes":
        return subprocess.run(
            args, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
    request = {
        "argv": [str(arg) for arg in args[1:]],
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
        "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
    }
    with Path(os.devnull).open() as null, _stream() as output, _stream() as errors:
        code = _fork(request, [null.fileno(), output.fileno(), errors.fileno()], timeout)
        texts = [(stream.seek(0), stream.read())[1] for stream in (output, errors)]
    return subprocess.CompletedProcess(args, code, *texts)


def _stream() -> Any:
    return tempfile.TemporaryFile("w+")


def _fork(request: dict[str, Any], streams: list[int], timeout: float) -> int:
    """Let the interpreter fork; return the fork's exit code."""
    interpreter, requests = _interpreter()
    requests.settimeout(timeout)
    try:
        socket.send_fds(requests, [json.dumps(request).encode()], streams)
        return int(requests.recv(REQUEST_BYTES))
    except BaseException:
        os.killpg(interpreter.pid, signal.SIGKILL)
        interpreter.wait()
        _interpreter.cache_clear()
        raise


@cache
def _interpreter() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the interpreter that forks for this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        interpreter = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(its.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    interpreter.returncode = 0  # it ends with this process, and is not waited for
    atexit.register(ours.close)
    return interpreter, ours


def _serve() -> list[str]:
    """Fork for each request; return its arguments in the fork."""
    for module in MODULES:
        import_module(module)
    gc.freeze()  # or the end of each fork would look through all of it
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            message, streams, _flags, _sender = socket.recv_fds(requests, REQUEST_BYTES, 3)
            if not message:
                os._exit(0)
            pid = os.fork()
            if not pid:
                break
            for stream in streams:
                os.close(stream)
            _pid, status = os.waitpid(pid, 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
    request = json.loads(message)
    handle_signals(request["ignored"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # it goes by TMPDIR, which may be another now
    argv: list[str] = request["argv"]
    return argv


if __name__ == "__main__":
    how, *words = _serve()
    is_code = how == "-c"
    source = words.pop(0) if is_code else Path(how).read_text()
    sys.argv = [how, *words]
    sys.path[0] = "" if is_code else str(Path(how).parent)
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(source, "<string>" if is_code else how, "exec"), main.__dict__)
