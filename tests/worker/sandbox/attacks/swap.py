"""Registers a file and then swaps it with a link repeatedly."""

# ruff: noqa: B023 - called at once
import ctypes
import hashlib
import os
import time
from pathlib import Path

from common import folders_with_links, list_own_folders, outcome, plan, report, writable_folders

from halfstep.telemetry.events import Artifact
from halfstep.telemetry.spool import SpoolWriter

RENAME_EXCHANGE = 2
SECONDS = 60
libc = ctypes.CDLL(None, use_errno=True)

wanted = plan()
attempt = int(os.environ["HALFSTEP_ATTEMPT"])
run_folder = Path(os.environ["HALFSTEP_RUN_FOLDER"])
parents = [run_folder, *(each.parent for each in list_own_folders())]
places = [each for each in writable_folders() if each in parents]
content = b"o" * wanted["size"]
stages = []
for folder in reversed(folders_with_links()):
    if folder in places:
        continue
    for place in places:
        if outcome(lambda: folder.rename(place / "artifacts")) == "done":
            stages.append(place / "artifacts")
            break
    if stages:
        break
stage = stages[0] if stages else run_folder / "artifacts"
stage.mkdir(exist_ok=True)
(stage / "x.txt").write_bytes(content)
is_linked = outcome(lambda: (stage / "y.txt").symlink_to(wanted["secret"])) == "done"
event = Artifact(
    step=1,
    name="x.txt",
    path="artifacts/x.txt",
    size_bytes=len(content),
    sha256=hashlib.sha256(content).hexdigest(),
)
spool = run_folder / "spool"
with SpoolWriter(spool, attempt) as writer:
    writer.event(event)
report({"is_linked": is_linked, "stage": str(stage)})
gate, deadline = Path(wanted["gate"]), time.monotonic() + SECONDS
paths = [os.fsencode(stage / name) for name in ("x.txt", "y.txt")]
while not gate.exists() and time.monotonic() < deadline:
    for _ in range(1000):
        libc.renameat2(-100, paths[0], -100, paths[1], RENAME_EXCHANGE)
