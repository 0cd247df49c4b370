"""Output of notebook cells that does not come from Python's print."""

import subprocess
import sys
from pathlib import Path

import halfstep

#: The streams of a kernel that shows what is written to its file descriptors.
KERNEL = """
import os, subprocess, sys
from halfstep.session.cell_output import CellOutput

class OutStream:
    def __init__(self, stream):
        self.stream, self.watch_fd_thread = stream, True
    def write(self, text):
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()

# The kernel's own writes do not pass through the descriptors.
sys.stdout, sys.stderr = OutStream(os.fdopen(os.dup(1), "w")), OutStream(open(os.devnull, "w"))
output = CellOutput(["hunter2"])
print("from Python")
os.write(1, b"from a descriptor, hunter2\\n")
subprocess.run(["echo", "from a child"], check=True)
subprocess.run("echo a failure >&2; exec sleep 5 &", shell=True, check=True)
output.stop()
os.write(1, b"later\\n")
lines = output.take()
sys.stdout.flush()
os.write(2, "".join(f"{line.stream}: {line.text}\\n" for line in lines).encode())
"""


def test_descriptors_of_a_kernel_are_kept_and_shown() -> None:
    """Output of child processes is recorded, also of one that continues; only the log is
    redacted.
    """
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        cwd=Path(halfstep.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    kept, shown = done.stderr.splitlines(), done.stdout.splitlines()
    assert sorted(kept, key=str.lower) == [
        "a failure",
        "stderr: a failure",
        "stdout: from a child",
        "stdout: from a descriptor, ***",
        "stdout: from Python",
    ]
    assert sorted(shown) == ["from Python", "from a child", "from a descriptor, hunter2", "later"]


def test_a_redirection_that_the_script_made_later_stays(tmp_path: Path) -> None:
    """A later redirection, by a tool that captures a cell's output itself, is preserved."""
    begun, _, _ = KERNEL.partition('print("from Python")')
    redirected = """
os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 1)
output.stop()
os.write(1, b"to the file")
"""
    subprocess.run(
        [sys.executable, "-c", begun + redirected, str(tmp_path / "file")],
        cwd=Path(halfstep.__file__).parents[1],
        check=True,
    )
    assert (tmp_path / "file").read_text() == "to the file"
