"""Two processes that watch one run: the second one is refused, and the first loses nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.telemetry.run_folder import read_run
from halfstep.telemetry.writer_lock import WriterLock
from tests import warm
from tests.halfstep.watching.watch_made import Written

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
import halfstep
folder, name = sys.argv[1:]
watch = halfstep.watch(folder=folder, run=name, mode="offline")
print("ready", flush=True)
for line in sys.stdin:
    if line == "fork\\n":
        if os.fork() == 0:
            again = halfstep.watch(folder=folder, run=name, mode="offline")
            again.log({"child": 1.0})
            os._exit(0)
        os.wait()
    elif line == "orphan\\n":
        if os.fork() == 0:
            os.close(0), os.close(1), os.close(2)
            import time; time.sleep(60)
        os._exit(9)
    else:
        watch.log({line.strip(): 1.0})
    print("done", flush=True)
"""


class Writer:
    """A process that watches a run and logs the lines of its stdin."""

    def __init__(self, folder: Path, name: str = "it") -> None:
        self.process = warm.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> "Writer":
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def log(self, *names: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for name in names:
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "done\n"

    def end(self) -> str:
        return self.process.communicate(timeout=60)[1]


def names(folder: Path) -> list[str]:
    return [event["name"] for event in Written(folder).of("metric")]


def test_a_second_process_is_rejected(tmp_path: Path) -> None:
    """A second process is rejected with a line that names the first; a later one may continue."""
    name = "my run/1"
    first = Writer(tmp_path, name).ready()
    first.log("a", "b")
    second = Writer(tmp_path, name).ready()
    second.log("lost")
    first.log("c")
    error = second.end()
    [line] = error.splitlines()
    assert line.startswith(f"halfstep: not watching: process {first.process.pid} on ")
    assert "another `run` or `name`" in line
    first.log("d")
    first.end()
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert names(folder) == ["a", "b", "c", "d"]
    third = Writer(tmp_path, name).ready()
    third.log("e")
    third.end()
    assert [attempt.attempt for attempt in read_run(folder).attempts] == [1, 2]


def test_of_many_that_begin_at_once_one_writes(tmp_path: Path) -> None:
    """Of several processes that start at once one writes, and the others are refused."""
    begun = [Writer(tmp_path) for _ in range(4)]
    writers = [writer.ready() for writer in begun]
    errors = [writer.end() for writer in writers]
    assert sum("not watching: " in error for error in errors) == 3
    assert len(read_run(tmp_path / "it").attempts) == 1


def test_a_forked_child_does_not_write_its_parents_run(tmp_path: Path) -> None:
    """A forked child that watches its parent's run is rejected, and the parent continues."""
    writer = Writer(tmp_path).ready()
    writer.log("a", "fork", "b")
    assert writer.end().count("not watching: ") == 1
    assert names(tmp_path / "it") == ["a", "b"]


def test_a_process_that_outlives_the_writer_keeps_no_lock(tmp_path: Path) -> None:
    """A forked child holds no lock of its parent, so a killed process's run can be continued."""
    writer = Writer(tmp_path).ready()
    assert writer.process.stdin is not None
    writer.process.stdin.write("orphan\n")
    assert writer.end() is not None
    assert writer.process.returncode == 9
    lock = WriterLock()
    assert lock.claim(tmp_path / "it")
    assert not WriterLock().claim(tmp_path / "it")
    lock.release()
    assert lock.claim(tmp_path / "it")
    lock.release()
