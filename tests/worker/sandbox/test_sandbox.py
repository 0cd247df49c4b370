"""The sandbox of runs, with real attacks and with healthy runs."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from db.database import Database
from db.queue import workers
from db.settings import Settings
from db.tables import Status, User
from halfstep.isolation import VARIABLE, Isolation
from tests.db.conftest import submit_command
from tests.site import Site, until
from tests.worker.commands.checkout_made import commit_files
from worker.sandbox import sandbox

#: Fresh interpreters, as in production: what a test forks has paths of its own in memory.
SANDBOX = {"HALFSTEP_SANDBOX": "yes", "HALFSTEP_ALLOW_COMMANDS": "yes", "HALFSTEP_COLD": "yes"}
pytestmark = pytest.mark.only_on("sqlite")

#: Tries to write what other processes execute, and prints where it succeeded. Files that it makes
#: are deleted, so that a sandbox with a hole leaves this environment as it was.
ATTACK = """
import json, os, site, sys
from pathlib import Path

def attacked():
    wanted = json.loads(Path(WANTED).read_text())
    home = Path.home()
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    import halfstep
    checkout = Path(halfstep.__file__).parents[1]
    made = [f"{each}/halfstep-attack.pth" for each in packages]
    made += [checkout / "app/attack.py", checkout / "attack.py", home / ".gitconfig"]
    made += [home / ".local/bin/x", home / ".config/git/config", "/usr/local/bin/attack"]
    made += [Path(sys.executable).parent / "attack"]
    made += [home / ".cache/torch_extensions/attack.so", home / ".triton/cache/attack.so"]
    made += [home / ".ssh/authorized_keys", "/etc/cron.d/attack", Path(sys.prefix, "attack")]
    made += [f"{wanted['data']}/recipes.json.new", f"{wanted['data']}/runs/attack"]
    made += [Path(wanted["cwd"], "sqlite3.py"), *wanted["made"]]
    opened = [checkout / "app/__init__.py", checkout / "trainer/process.py", *wanted["opened"]]
    opened += ["/proc/sys/kernel/core_pattern", "/etc/passwd"]
    succeeded = [str(each) for each in made if creates(Path(each))]
    succeeded += [str(each) for each in opened if opens(each, os.O_WRONLY)]
    devices = [each for each in Path("/dev").iterdir() if each.is_block_device()]
    read = [*devices, *wanted["read"]]
    succeeded += [f"read {each}" for each in read if opens(each, os.O_RDONLY)]
    print("ATTACKED " + json.dumps([succeeded, len(made) + len(opened)]), flush=True)

def creates(path):
    try:
        missing = [each for each in path.parents if not each.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x"):
            path.unlink()
        for each in missing:
            each.rmdir()
        return True
    except OSError:
        return False

def opens(path, flags):
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
        return True
    except OSError:
        return False
"""
RECIPE = """
from trainer.recipes.digits import Digits

class Attack(Digits):
    name = "attack"

    def __init__(self, config, device):
        attacked()
        super().__init__(config, device)
"""
#: A healthy script: compiled kernels, data workers, semaphores, pools, caches, devices.
SOUND = """
import multiprocessing, os, subprocess, tempfile
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    data = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=2, batch_size=4)
    print("LOADED", sum(float(batch.sum()) for [batch] in data))
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        print("POOL", sum(pool.map(abs, [-1, 2])))
    with context.Lock(), multiprocessing.Manager() as manager:
        print("SHARED", manager.list([1, 2])[1], torch.ones(2).share_memory_().sum().item())
    compiled = torch.compile(lambda x: torch.relu(x).sin() + 1)
    print("COMPILED", compiled(torch.zeros(4)).sum().item())
    Path("written").write_text("in the working folder")
    Path(os.environ["XDG_CACHE_HOME"], "mine").mkdir(parents=True)
    with tempfile.NamedTemporaryFile() as file:
        print("TEMPORARY", Path(file.name).is_relative_to(os.environ["TMPDIR"]))
    print(subprocess.run(["sh", "-c", "echo SHELL 2> /dev/null; head -c1 /dev/urandom | wc -c"],
                         capture_output=True, text=True, check=True).stdout)

if __name__ == "__main__":
    main()
"""
PRELOADED = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void escape(void) {
    int file = open("PLACE", O_CREAT | O_WRONLY, 0644);
    if (file >= 0) close(file);
}
"""


def submit(site: Site, line: str, **changes: Any) -> int:
    with site.database.writing() as session:
        return submit_command(session, site.owner, line, **changes).id


def working_sandbox(site: Site) -> tuple[bool, dict[str, str]]:
    """Return the worker's log line about its sandbox."""
    until(lambda: site.offers("digits"))
    with site.database.reading() as session:
        [(row, _)] = workers.all_workers(session)
    return row.is_sandboxed, row.sandbox


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with credentials that a run may damage."""
    folder = tmp_path / "home"
    (folder / ".aws").mkdir(parents=True)
    (folder / ".aws" / "credentials").write_text("key")
    (folder / ".config" / "halfstep").mkdir(parents=True)
    (folder / ".config" / "halfstep" / "login.json").write_text("{}")
    (folder / ".local/state/halfstep/servers").mkdir(parents=True)
    (folder / ".local/state/halfstep/servers/a.json").write_text("{}")
    return folder


def test_a_run_writes_nothing_that_other_processes_execute(
    site: Site, home: Path, tmp_path: Path
) -> None:
    """Neither a command nor a recipe can write packages, code, configuration, PATH or /tmp."""
    settings = Settings(data=site.data, database_url=site.url)
    settings.secrets_key.write_text("key")
    project = tmp_path / "project"
    project.mkdir()
    wanted = tmp_path / "wanted.json"
    attack = ATTACK.replace("WANTED", repr(str(wanted)))
    (project / "attack.py").write_text(attack + RECIPE)
    (project / "script.py").write_text(attack + "\nattacked()\n")
    first = site.submit(steps=2)
    variables = {"HALFSTEP_RECIPES": f"{project / 'attack.py'}:Attack", "HOME": str(home)}
    variables["XDG_STATE_HOME"] = str(home / ".local" / "state")
    with site.worker(**SANDBOX, **variables) as process:
        site.wait(first)
        others = site.data / "runs" / str(first)
        plan = {
            "data": str(site.data),
            "cwd": str(Path.cwd()),
            "made": [
                str(project / "torch.py"),
                str(site.scratch(first) / "9"),
            ],
            "opened": [str(project / "attack.py"), str(others / "job-1.json")],
            "read": [str(home / ".aws/credentials"), str(home / ".config/halfstep/login.json")],
        }
        plan["read"] += [str(home / ".local/state/halfstep/servers/a.json"), "/etc/shadow"]
        plan["read"] += [str(settings.secrets_key), f"/proc/{process.pid}/environ"]
        wanted.write_text(json.dumps(plan))
        command = submit(site, f"python {project / 'script.py'}", folder=str(project))
        recipe = site.submit(steps=2, recipe="attack")
        for run_id in (command, recipe):
            ended = site.wait(run_id)
            assert ended.status == Status.FINISHED, ended.error
            [line] = [each for each in site.log(run_id).splitlines() if "ATTACKED " in each]
            succeeded, count = json.loads(line.partition("ATTACKED ")[2])
            assert succeeded == []
            assert count > 20
        assert working_sandbox(site) == (True, {})


@pytest.fixture
def short_site(database: Database, database_url: str, ada: User) -> Iterator[Site]:
    """A site with a short path, because multiprocessing's sockets in TMPDIR allow 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="halfstep-", ignore_cleanup_errors=True) as folder:
        yield Site(Path(folder), database, database_url, ada)


@pytest.mark.extended
def test_sound_runs_train_in_the_sandbox(short_site: Site, home: Path, tmp_path: Path) -> None:
    """torch.compile, data workers, pools, semaphores and caches work in the sandbox."""
    site = short_site
    script = tmp_path / "sound.py"
    script.write_text(SOUND)
    config = {"precision": "fp32", "training": {"steps": 2, "compile": True}}
    with site.worker(**SANDBOX, HOME=str(home)):
        compiled = site.submit(recipe="mlp", config=config)
        sound = submit(site, f"python {script}")
        for run_id in (compiled, sound):
            ended = site.wait(run_id)
            assert ended.status == Status.FINISHED, ended.error
    printed = site.log(sound).splitlines()
    for line in ("LOADED 28.0", "POOL 3", "SHARED 2 2.0", "COMPILED 4.0", "TEMPORARY True"):
        assert line in printed
    assert (site.scratch(sound) / "work" / "written").exists()
    assert sorted(each.name for each in home.iterdir()) == [".aws", ".config", ".local"]


@pytest.mark.extended
def test_variables_of_a_command_load_nothing_outside_of_the_sandbox(
    site: Site, tmp_path: Path
) -> None:
    """Libraries of LD_PRELOAD and programs in git's configuration stay within the sandbox."""
    places = [tmp_path / "preloaded", tmp_path / "configured"]
    (tmp_path / "it.c").write_text(PRELOADED.replace("PLACE", str(places[0])))
    library = str(tmp_path / "it.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "it.c"], check=True)
    commit = commit_files(tmp_path / "it", text="it", **{".gitattributes": "text filter=it"})
    configured = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "filter.it.smudge"}
    configured["GIT_CONFIG_VALUE_0"] = f"touch {places[1]}; cat"
    with site.worker(**SANDBOX):
        preloaded = submit(site, "true", variables={"LD_PRELOAD": library})
        cloned = submit(
            site, "true", git=f"file://{tmp_path / 'it'}", commit=commit, variables=configured
        )
        assert site.wait(preloaded).status == Status.FINISHED
        site.wait(cloned)
    assert [each for each in places if each.exists()] == []


@pytest.mark.extended
def test_a_checkout_reads_nothing_private(site: Site, tmp_path: Path) -> None:
    """Git can clone a repository of the worker's machine, but none in another run's folder."""
    public = commit_files(tmp_path / "public", text="public")
    with site.worker(**SANDBOX):
        cloned = submit(site, "cat text", git=f"file://{tmp_path / 'public'}", commit=public)
        assert site.wait(cloned).status == Status.FINISHED
        other = site.scratch(cloned) / "work"
        stolen = submit(site, "cat text", git=f"file://{other}", commit=public)
        assert site.wait(stolen).status == Status.FAILED
    assert "public" in site.log(cloned).splitlines()
    assert "public" not in site.log(stolen).splitlines()


@pytest.mark.extended
def test_recipes_read_named_roots_only(site: Site, tmp_path: Path) -> None:
    """With an empty HALFSTEP_DATA_ROOTS recipes may read no path outside of the run's folder."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 1000)
    config = {"precision": "fp32", "training": {"steps": 1}}
    for roots, path, error in (
        ("", "/etc/shadow", "runs may not read it"),
        ("", str(text), "HALFSTEP_DATA_ROOTS"),
        (str(tmp_path), str(text), None),
    ):
        run_id = site.submit(recipe="gpt", config=config | {"recipe": {"text": path}})
        with site.worker(**SANDBOX, HALFSTEP_DATA_ROOTS=roots):
            ended = site.wait(run_id)
        assert ended.status == (Status.FAILED if error else Status.FINISHED), ended.error
        assert (error or "") in (ended.error or "")


@pytest.mark.extended
def test_a_worker_says_which_place_a_run_could_write(site: Site, home: Path) -> None:
    """A writable root that has programs of others voids the sandbox, and the worker names it."""
    roots = os.pathsep.join([str(home / ".config"), "/usr/local/bin"])
    with site.worker(**SANDBOX, HALFSTEP_WRITE_ROOTS=roots, HOME=str(home)):
        stands, found = working_sandbox(site)
    assert not stands
    assert found["sandbox"].startswith("a run could write ")
    assert str(home / ".config") in found["sandbox"]


def test_a_sandbox_that_cannot_be_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without Landlock, or a read-only run folder, is reported as no sandbox."""
    settings = Settings(data=tmp_path / "data", sandbox=True)
    assert sandbox.obstacle(settings) == ""
    assert sorted((tmp_path / "data" / "scratch").iterdir()) == []
    barred = settings.model_copy(update={"sandbox_namespaces": False})
    assert sandbox.obstacle(barred).startswith("a run could change ")
    monkeypatch.setattr(Isolation, "variable", lambda self: {VARIABLE: "[]"})
    assert sandbox.obstacle(settings).startswith("its probe failed: ")
    monkeypatch.setattr(sandbox, "is_supported", lambda: False)
    assert "no Landlock" in sandbox.obstacle(settings)


@pytest.mark.parametrize("device", ["/dev/nvidiactl", "/dev/dxg", ""])
def test_the_driver_of_gpus_is_found_by_its_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA driver is found by its device, also in WSL."""
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == device)
    assert sandbox.has_cuda() is bool(device)
