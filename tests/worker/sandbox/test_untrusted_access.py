"""Only one module of the service opens files that a run can write.

Python reports each access by path to an audit hook; the module itself works from descriptors.
"""

import subprocess
from pathlib import Path

import pytest

from db.tables import Status
from tests.db.conftest import submit_command
from tests.site import Site

#: Loaded by worker and supervisors, whose accesses by path it records. A training has torch, and a
#: command is started without it.
HOOK = """
import os, re, sys, threading

BELOW = re.compile(r"/scratch/\\d+/\\d+/.")
KINDS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}
KINDS |= {"os.link", "os.symlink", "os.chmod", "os.chown", "os.utime", "os.truncate"}
KINDS |= {"shutil.rmtree", "shutil.copyfile", "shutil.move"}
busy = threading.local()

def record(event, arguments):
    is_service = "worker.daemon" in sys.modules and "torch" not in sys.modules
    if event not in KINDS or not is_service or getattr(busy, "writes", False):
        return
    frames, frame = [], sys._getframe(1)
    while frame:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    if any(name.endswith("halfstep/untrusted_files.py") for name in frames):
        kind = "allowed"
    elif any(BELOW.search(str(each)) for each in arguments[:2]):
        kind = "forbidden"
    else:
        return
    callers = [name for name in frames if "/worker/" in name]
    busy.writes = True  # a descriptor kept open would be another file's after a fork
    with open(PATH, "a") as log:
        log.write(f"{kind} {event} {arguments[:2]} {callers[:1]}\\n")
    busy.writes = False

sys.addaudithook(record)
"""
SCRIPT = """
import os
import torch
import halfstep
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch = halfstep.watch(model)
for step in range(10):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "net.pt")
watch.checkpoint("net.pt")
watch.save_artifact("net.pt", name="net")
"""


@pytest.mark.only_on("sqlite")
def test_only_one_module_opens_files_of_a_run(site: Site, tmp_path: Path) -> None:
    """A recipe with checkpoints, a watched script and a checkout are recorded by this module
    only.
    """
    log = tmp_path / "accesses"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(f"PATH = {str(log)!r}\n{HOOK}")
    (tmp_path / "train.py").write_text(SCRIPT)
    repository = tmp_path / "repository"
    for words in (["init", "-q", str(repository)], ["commit", "-q", "--allow-empty", "-m", "a"]):
        options = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        folder = repository if repository.is_dir() else tmp_path
        subprocess.run(["git", *options, "-C", str(folder), *words], check=True)
    commit = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], check=True, capture_output=True
    ).stdout.decode()
    config = {"training": {"steps": 20}, "checkpoints": {"every_steps": 5, "keep_last": 1}}
    recipe = site.submit(config={"precision": "fp16"} | config)
    with site.database.writing() as session:
        script = submit_command(session, site.owner, f"python {tmp_path / 'train.py'}").id
        url = f"file://{repository}"
        options_of_git = {"git": url, "commit": commit.strip()}
        cloned = submit_command(session, site.owner, "true", **options_of_git).id
    variables = {"PYTHONPATH": str(hooks), "HALFSTEP_ALLOW_COMMANDS": "yes"}
    with site.worker(HALFSTEP_SANDBOX="yes", **variables):
        for run_id in (recipe, script, cloned):
            ended = site.wait(run_id)
            assert ended.status == Status.FINISHED, ended.error
    lines = log.read_text().splitlines()
    assert [line for line in lines if line.startswith("forbidden")] == []
    assert sum("spool" in line for line in lines) > 10
