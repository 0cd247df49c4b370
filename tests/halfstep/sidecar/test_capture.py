"""Output of a watched script: forwarded to its destination and recorded."""

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from halfstep.sidecar.capture import Descriptor
from halfstep.sidecar.process import LOCK
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.spool import SpoolReader
from tests import warm
from tests.site import SECONDS, heed, until
from tests.spool_made import events_of

pytestmark = pytest.mark.slow

BEGIN = """
import os, subprocess, sys, time
import halfstep
watch = halfstep.watch(name="it")
"""
PRINTS = """
for number in range(200):
    print("out", number, flush=True)
    print("err", number, file=sys.stderr, flush=True)
os.write(1, b"raw \\xff bytes\\n")
subprocess.run(["sh", "-c", "echo of a child; echo its error >&2"])
print("日本語")
"""
ON = {"HALFSTEP_CONSOLE": "yes", "HALFSTEP_SYSTEM": "yes"}


def start(
    folder: Path, script: str, environment: dict[str, str] | None = None, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a script in a folder, watched with its output captured."""
    (folder / "script.py").write_text(BEGIN + script)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    environment = {**os.environ, **(ON if environment is None else environment)}
    return warm.Popen([sys.executable, "script.py"], cwd=folder, env=environment, **streams)


def run_of(folder: Path) -> Path:
    """Return the run's folder, once its sidecar has ended."""
    run = folder / "halfstep-runs" / "it"
    until(lambda: not FolderLock(run / LOCK).is_held())
    assert not (run / "sidecar-error.txt").exists()
    return run


def read_logged(folder: Path) -> bytes:
    """Return the content of the run's log files."""
    parts = sorted((run_of(folder) / "log").glob("*.gz"))
    return b"".join(gzip.decompress(part.read_bytes()) for part in parts)


def read_recorded(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the sidecar's events of a kind."""
    items = SpoolReader(run_of(folder) / "sidecar").poll()
    return [each for each in events_of(items) if each["event"] == kind]


def sidecar_of(script: "subprocess.Popen[bytes]", folder: Path) -> psutil.Process:
    """Return the sidecar process of a script."""
    found: list[psutil.Process] = []

    def is_found() -> bool:
        for process in psutil.process_iter(["cmdline", "ppid"]):
            words = process.info["cmdline"] or []
            is_starter = process.info["ppid"] == script.pid  # it ends at once
            if "halfstep.sidecar.process" in words and str(folder) in words[-1] and not is_starter:
                found.append(process)
        return bool(found)

    until(is_found)
    return found[0]


def test_output_goes_where_it_went_and_is_kept(tmp_path: Path) -> None:
    """Output of scripts and child processes reaches its destination and the log byte for byte."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "watched").mkdir()
    bare = start(tmp_path / "bare", PRINTS, {}).communicate(timeout=SECONDS)
    watched = start(tmp_path / "watched", PRINTS).communicate(timeout=SECONDS)
    assert watched[0] == bare[0]
    assert watched[1].replace(b"watched", b"bare") == bare[1]
    log = read_logged(tmp_path / "watched")
    assert sorted(log.splitlines()) == sorted(b"".join(watched).splitlines())
    lines = read_recorded(tmp_path / "watched", "line")
    reported = {
        stream: [each["text"] for each in lines if each["stream"] == stream]
        for stream in ("stdout", "stderr")
    }
    assert reported["stdout"][:2] == ["out 0", "out 1"]
    assert reported["stdout"][-3:] == ["raw \ufffd bytes", "of a child", "日本語"]
    assert reported["stderr"][-1] == "its error"
    [part] = read_recorded(tmp_path / "watched", "log_part")
    assert part["path"] == "log/attempt-0001-000001.txt.gz"


def test_one_destination_keeps_the_order_of_lines(tmp_path: Path) -> None:
    """With `2>&1` lines of both streams keep their order."""
    out, _ = start(tmp_path, PRINTS, stderr=subprocess.STDOUT).communicate(timeout=SECONDS)
    numbers = [line for line in out.splitlines() if line.startswith((b"out", b"err"))]
    assert numbers == [b"%s %d" % (name, i) for i in range(200) for name in (b"out", b"err")]
    assert read_logged(tmp_path) == out


@pytest.mark.parametrize(
    ("ending", "code"),
    [("raise ValueError('wrong')", 1), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)],
)
def test_the_last_output_of_a_script_is_kept(tmp_path: Path, ending: str, code: int) -> None:
    """An exception's traceback and the last output before a SIGKILL are recorded."""
    script = start(tmp_path, f"print('last words', flush=True)\n{ending}\n")
    _, errors = script.communicate(timeout=SECONDS)
    assert script.returncode == code
    log = read_logged(tmp_path)
    assert b"last words\n" in log
    if code == 1:
        assert b"ValueError: wrong" in log
        assert b"ValueError: wrong" in errors


def test_the_script_survives_its_sidecar(tmp_path: Path) -> None:
    """If the sidecar is killed, later output is not recorded, and the script continues."""
    script = start(
        tmp_path,
        "print('first', flush=True)\nsys.stdin.readline()\n"
        "for number in range(100_000): print('line', number)\n"
        "sys.stdout.flush()\n"
        "subprocess.run(['echo', 'a child'])\n",
        stdin=subprocess.PIPE,
    )
    assert script.stdout
    first = script.stdout.readline()
    sidecar = sidecar_of(script, tmp_path)
    sidecar.kill()
    until(lambda: not FolderLock(tmp_path / "halfstep-runs" / "it" / LOCK).is_held())
    out, _ = script.communicate(b"\n", timeout=SECONDS)
    assert script.returncode == 0
    assert first + out == b"first\n" + b"".join(b"line %d\n" % i for i in range(100_000)) + (
        b"a child\n"
    )


def test_a_script_whose_reader_ends_gets_its_error(tmp_path: Path) -> None:
    """With `| head` the script ends as it does without the watch."""
    printing = "while True: print('line', flush=True)\n"
    codes = []
    for name, environment in (("bare", {}), ("watched", ON)):
        (tmp_path / name).mkdir()
        script = start(tmp_path / name, printing, environment)
        assert script.stdout
        assert script.stdout.readline() == b"line\n"
        script.stdout.close()
        assert script.stderr
        with script.stderr:
            assert b"BrokenPipeError" in script.stderr.read()
        codes.append(script.wait(SECONDS))
    assert codes[0] == codes[1]


def test_a_terminal_stays_one(tmp_path: Path) -> None:
    """The script sees a terminal of the same size, and its output reaches it."""
    mine, theirs = os.openpty()
    script = start(
        tmp_path,
        "print(sys.stdout.isatty(), os.get_terminal_size(1) == os.get_terminal_size(0))\n"
        "print('\\rbar', end='')\n",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(mine, 4096):
            shown += piece
    except OSError:  # the last writer has closed it
        pass
    os.close(mine)
    assert script.wait(SECONDS) == 0
    assert shown.endswith(b"True True\r\n\rbar")
    assert read_logged(tmp_path).endswith(b"True True\n\rbar")


def test_secrets_are_hidden_in_the_log_only(tmp_path: Path) -> None:
    """Values of environment variables with the names of secrets are hidden, in the log only."""
    secret = {"MY_API_KEY": "sesame-open-sesame", "PWD": str(tmp_path)}
    script = start(tmp_path, "print(os.environ['MY_API_KEY'], os.getcwd())", ON | secret)
    out, _ = script.communicate(timeout=SECONDS)
    assert out == f"sesame-open-sesame {tmp_path}\n".encode()
    assert f"*** {tmp_path}\n".encode() in read_logged(tmp_path)


def test_finish_restores_the_output(tmp_path: Path) -> None:
    """After `finish` output is not recorded for the run; another run has its own."""
    out, _ = start(
        tmp_path,
        "before = os.fstat(1)\nprint('of the run')\nwatch.finish()\n"
        "assert os.fstat(1) != before\nprint('later')\n"
        "again = halfstep.watch(name='again')\nprint('of another')\nagain.finish()\n",
    ).communicate(timeout=SECONDS)
    assert out == b"of the run\nlater\nof another\n"
    assert b"of the run" in read_logged(tmp_path)
    assert b"later" not in read_logged(tmp_path)


@pytest.mark.parametrize("console", [True, False])
def test_a_failed_runs_log_ends_when_the_next_begins(tmp_path: Path, console: bool) -> None:
    """A failed run's log ends when its process begins another run, as in notebooks and sweeps."""
    out, _ = start(
        tmp_path,
        "try:\n    with watch:\n        print('of the run')\n        raise ValueError\n"
        "except ValueError:\n    print('caught')\n"
        f"with halfstep.watch(name='again', console={console}):\n    print('of another')\n",
    ).communicate(timeout=SECONDS)
    assert out == b"of the run\ncaught\nof another\n"
    assert b"of the run" in read_logged(tmp_path)
    assert b"of another" not in read_logged(tmp_path)


def test_a_script_without_output_is_sampled(tmp_path: Path) -> None:
    """A script without stdout and stderr, or with console=False, is still sampled."""
    script = start(tmp_path, "print('unseen')", {**ON, "HALFSTEP_CONSOLE": "no"})
    out, _ = script.communicate(timeout=SECONDS)
    assert out == b"unseen\n"
    samples = read_recorded(tmp_path, "sample")
    assert samples[0]["device"] == -1
    assert samples[0]["memory_bytes"] > 0
    assert not read_recorded(tmp_path, "line")


def test_a_forked_child_prints_into_the_log(tmp_path: Path) -> None:
    """Output of a forked child is logged, but the child keeps neither sidecar nor script alive."""
    script = start(
        tmp_path,
        "if not os.fork():\n    print('of a fork', flush=True)\n    os._exit(0)\nos.wait()\n",
    )
    script.communicate(timeout=SECONDS)
    assert script.returncode == 0
    assert b"of a fork\n" in read_logged(tmp_path)


def test_a_signal_ends_the_script_as_before(tmp_path: Path) -> None:
    """Ctrl-C ends the script and not the sidecar, which records the traceback."""
    codes = []
    for name, environment in (("bare", {}), ("watched", ON)):
        (tmp_path / name).mkdir()
        waiting = "print('ready', flush=True)\ntime.sleep(600)"
        with heed(signal.SIGINT):
            script = start(tmp_path / name, waiting, environment)
        assert script.stdout
        assert script.stdout.readline() == b"ready\n"
        script.send_signal(signal.SIGINT)
        script.communicate(timeout=SECONDS)
        codes.append(script.returncode)
    assert codes[0] == codes[1] != 0
    assert b"KeyboardInterrupt" in read_logged(tmp_path / "watched")


def test_a_descriptor_that_the_script_reuses_is_not_changed(tmp_path: Path) -> None:
    """A file descriptor that the script closed and reused is left alone."""
    ours = Descriptor.of(os.open(os.devnull, os.O_RDONLY))
    assert ours.is_ours()
    os.close(ours.number)
    assert not ours.is_ours()
    theirs = os.open(tmp_path / "mine", os.O_WRONLY | os.O_CREAT)
    assert theirs == ours.number
    assert not ours.is_ours()
    ours.close()
    assert os.write(theirs, b"x") == 1
    os.close(theirs)
