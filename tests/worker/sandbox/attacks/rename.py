"""Moves folders with links to where the service writes, so that it follows them."""

# ruff: noqa: B023 - called at once
import os
import signal
from pathlib import Path

from common import folders_with_links, list_own_folders, outcome, plan, report, writable_folders

from halfstep.telemetry.spool import EVENT, FILE_HEADER, MAGIC, VERSION, frame

PARTS = range(1, 5)


def fill(folder: Path, targets: list[str]) -> None:
    """Create every link through which the service may write."""
    left = list(targets)
    for part in PARTS:
        stem = f"attempt-{attempt:04}-{part:06}.txt"
        if outcome(lambda: (folder / stem).open("x").write("overwritten\n")) != "done":
            print(folder / stem, "is there")
        for name in (f".{stem}.gz.partial", f"{stem}.gz"):
            link(folder / name, left[0])
    for name in ("frames", f"{attempt}-0.spool", f"{attempt}-1.spool", "supervisor.log"):
        link(folder / name, left[1])
    for name in ("new", f"attempt-{attempt:04}-{max(PARTS) + 1:06}.txt"):
        link(folder / name, left[2])


def link(path: Path, target: str) -> None:
    outcome(lambda: path.symlink_to(target))


wanted = plan()
attempt = int(os.environ["HALFSTEP_ATTEMPT"])
parents = [*list_own_folders(), *(each.parent for each in list_own_folders())]
places = [each for each in writable_folders() if each in parents or each.parent in parents]
free = [each for each in folders_with_links() if each in places]
moved = {}
for name, folder in zip(wanted["names"], reversed(free), strict=False):
    fill(folder, wanted["targets"])
    for place in places:
        if place == folder or folder in place.parents:
            continue
        there = place / name.format(attempt=attempt)
        outcome(lambda: there.rename(there.with_name(f"{there.name}.old")))
        if outcome(lambda: folder.rename(there)) == "done":
            moved[str(there)] = sorted(each.name for each in there.iterdir())
            break
for place in places:  # an event that cannot be recorded, wherever the service reads events
    spool = place if place.name == "spool" else place / "spool"
    outcome(spool.mkdir)
    head = FILE_HEADER.pack(MAGIC, VERSION)
    bad = frame(EVENT, b'{"kind": "no such event", "text": "overwritten"}')
    outcome(lambda: (spool / f"{attempt}-0.spool").write_bytes(head + bad))
report({"moved": moved, "free": [str(each) for each in free]})
if wanted["ends_by_signal"] and attempt == 1:
    os.kill(os.getpid(), signal.SIGKILL)
