"""Replaces files that the service reads by ones whose reading never ends."""

# ruff: noqa: B023 - called at once
import os
import signal
import sys
from pathlib import Path

from common import outcome, plan, report, writable_folders

GIB = 2**30


def replace(path: Path, kind: str) -> None:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.old"))
    else:
        path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "x").mkdir(parents=True)
    else:
        with path.open("wb") as file:
            file.truncate(wanted["gib"] * GIB)


def nest(place: Path) -> None:
    """Make folders deeper than recursion, and longer than a path."""
    here = os.open(place, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


wanted = plan()
attempt = os.environ["HALFSTEP_ATTEMPT"]
folder = Path(os.environ["HALFSTEP_RUN_FOLDER"])
done = []
if attempt == "1":
    for name in wanted["names"]:
        for place in {
            folder,
            *(each for each in writable_folders() if each.parent == folder),
            Path.cwd(),
        }:
            path = place / name.format(attempt=1)
            if outcome(lambda: replace(path, wanted["kind"])) == "done":
                done.append(str(path))
    if wanted["kind"] == "nested":
        for place in (Path.cwd(), Path(os.environ["TMPDIR"])):
            print("nested", outcome(lambda: nest(place)), flush=True)
    if wanted["kind"] == "names":
        for place in [each for each in writable_folders() if ".git" not in each.parts]:
            for name in (b"attempt-0001-000009.\xff.txt", b"1-\xff.spool", b"\xff\n\x1b[2J.py"):
                outcome(lambda: Path(os.fsdecode(os.fsencode(place) + b"/" + name)).write_text("x"))
    report(done)
    if wanted["again"]:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(1)
report("again")
