"""Every way in which a process can end, with real processes: outcome, exit code and last rows."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.run_folder import read_outcome, read_run
from tests import preloaded, warm
from tests.halfstep.telemetry.ingest_made import IngestServer
from tests.halfstep.watching.watch_made import Written
from tests.marks import extended, sampled
from tests.site import heed, until

pytestmark = pytest.mark.slow

STEPS = 300
SCRIPT = """
import atexit, concurrent.futures, ctypes, faulthandler, multiprocessing as mp, os, signal, sys
import multiprocessing.util, threading, time
from sys import exit as early_exit
import torch, halfstep

FOLDER = sys.argv[1] if len(sys.argv) > 1 else os.environ["RUNS"]

def train(name="it"):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = halfstep.watch(net, folder=FOLDER, name=name, config={"name": name})
    for i in range(300):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        watch.log({"accuracy": i / 300})
    return watch

def trained(end, name="it"):
    train(name)
    ENDS[end]()

def raises(): raise ValueError("boom")
def raises_exit(code): raise SystemExit(code)
def caught():
    try: sys.exit(3)
    except SystemExit: pass
def caught_then(end):
    caught(); end()
def in_except():
    try: raises()
    except ValueError: sys.exit(2)
def interrupted(): signal.raise_signal(signal.SIGINT)
def signalled(number): os.kill(os.getpid(), number); signal.pause()
def register(): faulthandler.register(signal.SIGQUIT, open(os.devnull, "w"))
def own_fault_handler():
    faulthandler.enable(); os.abort()
def abort_of_a_child():
    child = mp.get_context("fork").Process(target=os.abort); child.start(); child.join()
    os.kill(os.getpid(), signal.SIGKILL)
def in_thread():
    thread = threading.Thread(target=raises); thread.start(); thread.join()
def with_block():
    with train("other"): sys.exit(5)
def kept():
    try: sys.exit(6)
    except SystemExit as error:
        frame = sys._getframe(); cycle = error
        raise

ENDS = {
    "return": lambda: None,
    "raise": raises,
    "exit 3": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("bad data"),
    "exit None": lambda: sys.exit(None),
    "exit nothing": lambda: sys.exit(),
    "exit True": lambda: sys.exit(True),
    "exit False": lambda: sys.exit(False),
    "exit 0": lambda: sys.exit(0),
    "exit -1": lambda: sys.exit(-1),
    "exit 256": lambda: sys.exit(256),
    "exit 2.5": lambda: sys.exit(2.5),
    "exit in except": in_except,
    "exit kept": kept,
    "exit caught": caught,
    "exit caught, then raise": lambda: caught_then(raises),
    "exit caught, then exit": lambda: caught_then(lambda: sys.exit(4)),
    "raise SystemExit": lambda: raises_exit(3),
    "exit()": lambda: exit(3),
    "imported exit": lambda: early_exit(3),
    "os._exit 0": lambda: os._exit(0),
    "os._exit 3": lambda: os._exit(3),
    "interrupt": interrupted,
    "SIGTERM": lambda: signalled(signal.SIGTERM),
    "SIGHUP": lambda: signalled(signal.SIGHUP),
    "SIGQUIT": lambda: signalled(signal.SIGQUIT),
    "SIGXCPU": lambda: signalled(signal.SIGXCPU),
    "alarm": lambda: (signal.alarm(1), signal.pause()),
    "dump": lambda: os.kill(os.getpid(), signal.SIGQUIT),
    "register": lambda: (register(), halfstep.finish(), os.kill(os.getpid(), signal.SIGQUIT)),
    "abort": os.abort,
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGBUS": lambda: signalled(signal.SIGBUS),
    "own fault handler": own_fault_handler,
    "abort of a child": abort_of_a_child,
    "helper thread raises": in_thread,
}

def forked(end):
    child = os.fork()
    if child == 0:
        trained(end)
        return
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    os._exit(0)

def child_of(method, end):
    context = mp.get_context(method)
    child = context.Process(target=trained, args=(end,))
    child.start()
    child.join()
    print(child.exitcode)

def pool(how, names, size):
    if how == "executor":
        with concurrent.futures.ProcessPoolExecutor(size, mp.get_context("fork")) as workers:
            futures = [workers.submit(pooled, name) for name in names]
            print([str(future.exception()) for future in futures])
    else:
        with mp.get_context(how).Pool(size, maxtasksperchild=None) as workers:
            futures = [workers.apply_async(pooled, (name,)) for name in names]
            for future in futures: future.wait()
            print(["None" if future.successful() else str(future._value) for future in futures])

def pooled(name):
    train(name)
    if "raises" in name: raises()

def closed_pool(task):
    with mp.get_context("fork").Pool(1) as workers:
        workers.apply(task, (sys.argv[1] + ".exits",))
        workers.close()  # the worker exits; leaving the block sends it SIGTERM
        while not os.path.exists(sys.argv[1] + ".exits"): time.sleep(0.01)

def terminated_pool(at):
    with mp.get_context("fork").Pool(1) as workers:
        workers.apply(trained_then_terminated, (at,))
        workers.close()
        workers.join()

def trained_then_terminated(at):
    train()  # then SIGTERM comes as soon as the worker enters or leaves a function
    code = ("def profile(frame, now, _argument):\\n if (frame.f_code.co_name, now) == at:\\n"
            "  sys.setprofile(None); os.kill(os.getpid(), 15)")
    module = {"__name__": "threading", "at": tuple(at.split()), "sys": sys, "os": os}
    exec(code, module)  # a frame of the script would be one of its task
    sys.setprofile(module["profile"])

def exits_slowly(path):
    train()
    mp.util.Finalize(None, os.open, (path, os.O_CREAT), exitpriority=9)
    mp.util.Finalize(None, time.sleep, (60,), exitpriority=8)

def threaded(end):
    thread = threading.Thread(target=trained, args=(end,))
    thread.start()
    thread.join()

def torch_spawn(end):
    context = torch.multiprocessing.spawn(rank, (end,), nprocs=1, join=False)
    try: context.join()
    except Exception: pass

def rank(_rank, end): trained(end)

if __name__ == "__main__":
    os.environ["RUNS"] = FOLDER
    kind, end = sys.argv[2:]
    if kind == "registered": register()
    if kind in ("main", "registered"): trained(end)
    elif kind == "os.fork": forked(end)
    elif kind == "thread": threaded(end)
    elif kind == "pool": pool(end, ["task 0", "task 1"], 2)
    elif kind == "failing pool": pool(end, ["raises first", "task 1", "raises last"], 1)
    elif kind == "closed pool": closed_pool(exits_slowly)
    elif kind == "terminated pool": terminated_pool(end)
    elif kind == "torch.spawn": torch_spawn(end)
    else: child_of(kind, end)
"""
#: status, exit code and a part of the error.
ENDS: dict[str, tuple[str, int | None, str | None]] = {
    "return": ("finished", 0, None),
    "raise": ("failed", 1, "ValueError: boom"),
    "exit 3": ("failed", 3, None),
    "exit text": ("failed", 1, "bad data"),
    "exit None": ("finished", 0, None),
    "exit nothing": ("finished", 0, None),
    "exit True": ("failed", 1, None),
    "exit False": ("finished", 0, None),
    "exit 0": ("finished", 0, None),
    "exit -1": ("failed", 255, None),
    "exit 256": ("finished", 0, None),
    "exit 2.5": ("failed", 1, "2.5"),
    "exit in except": ("failed", 2, "ValueError: boom"),
    "exit kept": ("failed", 6, None),
    "exit caught": ("finished", 0, None),
    "exit caught, then raise": ("failed", 1, "ValueError: boom"),
    "exit caught, then exit": ("failed", 4, None),
    "os._exit 0": ("finished", 0, None),
    "os._exit 3": ("failed", 3, None),
    "interrupt": ("terminated", -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": ("terminated", -signal.SIGTERM, None),
    "SIGHUP": ("terminated", -signal.SIGHUP, None),
    "SIGQUIT": ("terminated", -signal.SIGQUIT, None),
    "SIGXCPU": ("terminated", -signal.SIGXCPU, None),
    "alarm": ("terminated", -signal.SIGALRM, None),
    "helper thread raises": ("finished", 0, None),
}
#: Further exit codes and signals; the others are tested in `make test`, too.
VARIATIONS = {f"exit {value}" for value in ("None", "nothing", "True", "False", "0", "-1", "256")}
VARIATIONS |= {"exit 2.5", "exit in except", "SIGHUP", "SIGQUIT", "SIGXCPU"}
VARIATIONS |= {"exit caught", "exit caught, then exit", "os._exit 0"}
#: Of these Python learns no exit code: the C library writes it down after the outcome.
UNHOOKED = ["raise SystemExit", *extended(["exit()", "imported exit"])]
CHILD_ENDS = ["return", "raise", "exit 3", "exit text", "exit None", "os._exit 3", "SIGTERM"]
CHILDREN = [
    *(("fork", end) for end in CHILD_ENDS if end != "exit None"),
    *extended([("fork", "exit None")]),
    *extended(("os.fork", end) for end in CHILD_ENDS),
    ("spawn", "raise"),
    *extended(("spawn", end) for end in CHILD_ENDS if end != "raise"),
    *extended(("forkserver", end) for end in CHILD_ENDS),
]


#: Kinds of children that load the script's file again.
LOADING = {"spawn", "forkserver", "torch.spawn"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, kind: str, end: str) -> "subprocess.CompletedProcess[str]":
    """Run the script, with its runs next to it."""
    command = [sys.executable, str(script), str(script.parent / "runs"), kind, end]
    with heed(signal.SIGINT), heed(signal.SIGQUIT), heed(signal.SIGHUP):
        if {kind, end} & LOADING:
            return warm.run(command, timeout=120)
        if end == "exit in except":  # without any frame of tests.preloaded
            return subprocess.run(command, capture_output=True, text=True, timeout=120)
        return preloaded.run(command, timeout=120)


def outcome(script: Path, name: str = "it") -> dict[str, Any]:
    """Return the outcome of a run with complete steps and metrics."""
    folder = script.parent / "runs" / name
    written = Written(folder)
    assert written.steps["step"].tolist() == list(range(1, STEPS + 1))
    assert len(written.of("metric")) == STEPS
    found = read_outcome(AttemptFiles(folder, 1))
    assert found is not None
    assert found.step == STEPS
    assert not (folder / "crash-1").exists()
    return found


def check(found: dict[str, Any], status: str, code: int | None, error: str | None) -> None:
    assert (found.status, found.exit_code) == (status, code), found
    assert (error or "") in (found.error or "")
    assert (found.error is None) == (error is None)


@pytest.mark.parametrize("end", [*sorted(ENDS.keys() - VARIATIONS), *extended(sorted(VARIATIONS))])
def test_the_outcome_of_a_script_has_its_exit_code(script: Path, end: str) -> None:
    """A script's outcome has its exit code, and no step or number is lost."""
    done = run(script, "main", end)
    status, code, error = ENDS[end]
    assert done.returncode == code, done.stderr
    check(outcome(script), status, code, error)
    assert done.stderr.count("halfstep:") == 1


@pytest.mark.parametrize(("kind", "end"), [("registered", "dump"), ("main", "register")])
def test_a_handler_of_faulthandler_stays(script: Path, kind: str, end: str) -> None:
    """The script's own faulthandler stays registered; after the run's end SIGQUIT ends no
    process.
    """
    done = run(script, kind, end)
    assert done.returncode == 0, done.stderr
    assert outcome(script).status == "finished"


@pytest.mark.parametrize("end", UNHOOKED)
def test_an_exit_without_a_hook_has_its_exit_code(script: Path, end: str) -> None:
    """An exit without hooks has its exit code as outcome, once the process has ended."""
    assert run(script, "main", end).returncode == 3
    check(outcome(script), "failed", 3, None)
    files = AttemptFiles(script.parent / "runs" / "it", 1)
    files.exit_code.write_bytes(b"")
    assert read_outcome(files, lives=True) is None


@pytest.mark.parametrize(("kind", "end"), CHILDREN)
def test_the_outcome_of_a_child_has_its_exit_code(script: Path, kind: str, end: str) -> None:
    """A child of any start method has its last row, and its exit code as outcome."""
    done = run(script, kind, end)
    status, code, error = ENDS[end]
    assert done.stdout.split() == [str(code)], done.stderr
    check(outcome(script), status, code, error)


@pytest.mark.parametrize("how", ["fork", *extended(["spawn", "forkserver", "executor"])])
def test_the_tasks_of_a_pool_have_finished(script: Path, how: str) -> None:
    """Tasks of a pool have finished, although the pool ends its idle workers by SIGTERM."""
    done = run(script, "pool", how)
    assert done.returncode == 0, done.stderr
    for name in ("task-0", "task-1"):
        found = outcome(script, name)
        assert (found.status, found.error) == ("finished", None)


def test_a_worker_of_a_pool_that_is_terminated_at_its_exit_has_finished(script: Path) -> None:
    """A pool's worker has finished if SIGTERM comes between its last task and its exit."""
    done = run(script, "closed pool", "")
    assert done.returncode == 0, done.stderr
    assert (outcome(script).status, outcome(script).error) == ("finished", None)


@pytest.mark.parametrize("at", ["run return", "_exit_function call", "_child_ends call"])
def test_a_worker_of_a_pool_has_finished_wherever_sigterm_meets_its_exit(
    script: Path, at: str
) -> None:
    """A pool's worker has finished wherever SIGTERM comes after its last task."""
    done = run(script, "terminated pool", at)
    assert done.returncode == 0, done.stderr
    assert (outcome(script).status, outcome(script).error) == ("finished", None)


@pytest.mark.parametrize("how", ["executor", *extended(["fork", "spawn", "forkserver"])])
def test_the_task_of_a_pool_that_raises_has_failed(script: Path, how: str) -> None:
    """A pool's task that raises has failed, and its parent gets the exception."""
    done = run(script, "failing pool", how)
    assert done.stdout.strip() == "['boom', 'None', 'boom']", done.stderr
    for name in ("raises-first", "raises-last"):
        check(outcome(script, name), "failed", None, "ValueError: boom")
    assert outcome(script, "task-1").status == "finished"


#: Exit code, status that is sent, and the end of the error.
CRASHES = {
    "abort": (-signal.SIGABRT, "terminated", "Fatal Python error: Aborted (SIGABRT)"),
    "SIGSEGV": (-signal.SIGSEGV, "terminated", "Fatal Python error: Segmentation fault (SIGSEGV)"),
    "SIGBUS": (-signal.SIGBUS, "terminated", "Fatal Python error: Bus error (SIGBUS)"),
    "own fault handler": (-signal.SIGABRT, "vanished", None),
    "abort of a child": (-signal.SIGKILL, "vanished", None),
}


@pytest.mark.parametrize("end", sampled(CRASHES, CRASHES.keys() - {"SIGBUS"}))
def test_a_crash_is_sent_with_its_signal_and_place(
    script: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A crash is sent with its signal and faulthandler's traceback, unless the script has its
    own.
    """
    code, status, error = CRASHES[end]
    with IngestServer() as site:
        monkeypatch.setenv("HALFSTEP_URL", site.url)
        monkeypatch.setenv("HALFSTEP_TOKEN", "token")
        assert run(script, "main", end).returncode == code
        folder = script.parent / "runs" / "it"
        identity = read_run(folder).id
        until(lambda: identity in site.runs and site.runs[identity].attempts[1].outcome is not None)
        sent = site.runs[identity].attempts[1].outcome
    assert sent is not None
    is_known = status == "terminated"
    assert (sent["status"], sent["exit_code"]) == (status, code if is_known else None)
    assert (sent["error"] or "").splitlines()[-1:] == [error] * is_known
    assert ("in trained" in (sent["error"] or "")) == is_known


def test_a_thread_that_trains_and_raises_has_failed(script: Path) -> None:
    """A run in a thread that raises has failed, although the process exits with 0."""
    assert run(script, "thread", "raise").returncode == 0
    check(outcome(script), "failed", None, "ValueError: boom")


@pytest.mark.extended
def test_a_rank_of_torch_that_raises_has_failed(script: Path) -> None:
    """A rank that raises has failed, although torch.multiprocessing catches the exception."""
    run(script, "torch.spawn", "raise")
    check(outcome(script), "failed", 1, "ValueError: boom")
