"""Processes with everything loaded already, because a short process spends most of its time on
loading torch. A *nursery*, one per pytest process, has imported what training, supervisor, worker
and command need, without using it. `Popen` forks it instead of starting an interpreter, and forked
processes fork their own children. They are normal processes with a pid, a parent, signals and an
exit code. HALFSTEP_COLD=yes starts fresh interpreters instead. A test's own scripts fork too, as
files or as `python -c`, except those about their end."""

import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from setproctitle import setproctitle

ROOT = Path(__file__).parent.parent
MODULES = (
    "halfstep.cli.main",
    "trainer.probe",
    "torch.distributed.run",
    "trainer.process",
    "trainer.warm_process",
    "worker.attempts.supervisor",
    "worker.daemon",
    "worker.worker",
)
#: Modules that these load while they work.
LOADED = (
    "app.commands",
    "app.serve",
    "halfstep.session.run_start",
    "safetensors.torch",
    "sklearn.datasets",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "trainer.job",
    "trainer.recipes.digits",
    "trainer.recipes.erfnet",
    "trainer.recipes.gpt",
    "trainer.recipes.mlp",
    "trainer.recipes.wgan_gp",
)
#: Variables that an interpreter reads at its start, and libraries when loaded.
READ_AT_START = ("PYTHON", "LD_", "MKL_", "OPENBLAS_")
#: A worker's thread that waits for notifications of its database.
LISTENER = "listener"
#: Threads that a fork does not need: torchrun's keep-alive.
HARMLESS = (LISTENER, "RendezvousKeepAliveTimer")
UNBUFFERED = "PYTHONUNBUFFERED"  # which this process handles itself
REQUEST_BYTES = 2**17
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

#: Databases that this forked process may have open, and that its own forks must not inherit.
databases: "weakref.WeakSet[Any]" = weakref.WeakSet()
is_forked = False

Job = dict[str, Any]


class Popen(subprocess.Popen[Any]):
    """A subprocess.Popen that forks one of MODULES, or a script, if possible."""

    def _execute_child(self, *values: Any) -> None:
        asked = dict(zip(PARAMETERS, values, strict=True))
        env = dict(os.environ if asked["env"] is None else asked["env"])
        is_plain = not (asked["preexec_fn"] or asked["pass_fds"] or asked["shell"])
        argv = [str(each) for each in asked["args"] if each != "-u"]
        if not (is_plain and _is_known(argv) and _may_fork(argv, env)):
            super()._execute_child(*values)  # type: ignore[misc]
            return
        job = {
            "argv": argv,
            "env": env,
            "cwd": str(asked["cwd"] or Path.cwd()),
            "session": asked["start_new_session"],
            "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        }
        given = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if fd == -1 else fd for own, fd in enumerate(given)]
        self.pid = _fork(job, streams) if is_forked else _have_forked(job, streams)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))  # type: ignore[attr-defined]


def run(
    args: list[str], timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return it with its exit code and output, as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(args, **pipes, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


def _is_known(argv: list[str]) -> bool:
    if argv[:2] == [sys.executable, "-m"]:
        return argv[2] in MODULES
    is_script = len(argv) > 1 and (argv[1] == "-c" or argv[1].endswith(".py"))
    return argv[0] == sys.executable and is_script and not is_forked


def _may_fork(argv: list[str], env: Mapping[str, str]) -> bool:
    if "yes" in (os.environ.get("HALFSTEP_COLD"), env.get("HALFSTEP_COLD")):
        return False
    if _read_at_start(env) != _read_at_start(os.environ):
        return False
    # A thread would be missing in the fork: one of Python's with what it held, or the store's own.
    native = len(list(Path("/proc/self/task").iterdir()))
    threads = threading.enumerate()
    others = [t for t in threads if not t.name.startswith(HARMLESS)]
    is_supervisor = argv[2:3] == ["worker.attempts.supervisor"]
    is_alone = others == [threading.main_thread()] and not (is_supervisor and native > len(threads))
    return not is_forked or is_alone


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(READ_AT_START) and k != UNBUFFERED}


def _have_forked(job: Job, streams: list[int]) -> int:
    """Let the nursery fork; return the id of a new child of this process."""
    nursery = _nursery()
    socket.send_fds(nursery, [json.dumps(job).encode()], streams)
    return int(nursery.recv(REQUEST_BYTES))


@cache
def _nursery() -> socket.socket:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(its.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )
    nursery.returncode = 0  # it ends with this process, and is not waited for
    atexit.register(ours.close)
    return ours


def main() -> None:
    """Run the nursery: load everything, and fork on request."""
    _load()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        while True:
            message, streams, _flags, _sender = socket.recv_fds(asked, REQUEST_BYTES, 3)
            if not message:
                return
            asked.send(str(_let_go(json.loads(message), streams)).encode())
            for stream in streams:
                os.close(stream)


def _load() -> None:
    gc.disable()  # a quarter of the loading would be that
    subprocess.Popen = Popen  # type: ignore[misc]  # first: torchrun's module keeps what it finds
    for module in (*LOADED, *MODULES):
        import_module(module)
    database_class: Any = import_module("db.database").Database
    open_database = database_class.__init__

    def remember(self: Any, *given: Any) -> None:
        open_database(self, *given)
        databases.add(self)

    database_class.__init__ = remember
    import_module("trainer.probe").recipes()  # their schemas, which every worker's probe needs
    gc.freeze()  # or each fork's collections would copy all of it
    gc.enable()


def _let_go(job: Job, streams: list[int]) -> int:
    """Fork a process as a child of the parent process; return its PID."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if not pid:
            while os.getppid() != STARTER:  # only then may it depend on its parent
                time.sleep(0.001)
            _become(job, streams)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    return pid


def _fork(job: Job, streams: list[int]) -> int:
    """Fork a child of this process, which is a fork itself."""
    for database in list(databases):
        database.engine.dispose()
    sys.stdout.flush()
    sys.stderr.flush()
    while not all(map(_is_waiting, threading.enumerate())):  # then it holds nothing of ours
        time.sleep(0.001)
    pid = os.fork()
    if not pid:
        _become(job, streams)
    return pid


def _is_waiting(thread: threading.Thread) -> bool:
    """Return whether a listener waits for its connection or its next attempt."""
    frame = sys._current_frames().get(thread.ident or 0)
    return thread.name != LISTENER or frame is None or "wait" in frame.f_code.co_name


def _become(job: Job, streams: list[int]) -> NoReturn:
    """Become the job's process until its end; nothing inherited is closed."""
    global is_forked
    code = 1
    try:
        is_forked = True
        if job["session"]:
            os.setsid()
        _take_streams(streams, unbuffered=UNBUFFERED in job["env"])
        handle_signals(job["ignored"])
        atexit._clear()
        databases.clear()
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        tempfile.tempdir = None  # it goes by TMPDIR, which is another now
        _seed()
        sys.path[0] = job["cwd"]
        setproctitle(" ".join(job["argv"]))
        code = _run(job["argv"])
    finally:
        os._exit(code)


def _take_streams(streams: list[int], *, unbuffered: bool) -> None:
    own = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in streams]  # none where another goes
    for number, fd in enumerate(own):
        os.dup2(fd, number)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd > 2:
            with suppress(OSError):  # one is that by which they were listed
                os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True)


def handle_signals(ignored: Collection[int]) -> None:
    """Handle signals like a fresh interpreter with these ones ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        how = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if signal.getsignal(number) is not how:
            signal.signal(number, how)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _seed() -> None:
    import numpy

    random.seed()
    numpy.random.seed()


def _run(argv: list[str]) -> int:
    """Run a request like a fresh interpreter; return the exit code."""
    _python, how, *words = argv
    code = 0
    try:
        if how == "-m":
            sys.modules.pop(words[0], None)  # runpy complains of what is imported already
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = [how, *words[1:]]
            sys.modules["__main__"] = main_module = ModuleType("__main__")
            exec(words[0], main_module.__dict__)
        else:
            sys.argv = [how, *words]
            runpy.run_path(how, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


if __name__ == "__main__":
    STARTER = os.getppid()
    main()
