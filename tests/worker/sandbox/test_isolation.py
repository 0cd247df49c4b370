"""Runs as their own users, with limits: what they can access, and whom they affect."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import worker
from db.database import Database
from db.errors import Invalid
from db.queue import workers
from db.settings import Settings
from db.tables import Status, User
from halfstep import sandbox
from halfstep.isolation import Isolation
from tests.db.conftest import submit_command
from tests.site import SECONDS, Site, until
from tests.worker.test_warm_start import DESCRIBED, description
from worker.sandbox import cgroup_limits, run_users
from worker.sandbox.cgroup_limits import RunGroup
from worker.sandbox.sandbox import ISOLATED

#: Of this process only: its test runs kill all processes of these users.
FIRST = 61000 + os.getpid() % 90 * 2
USERS = f"{FIRST}-{FIRST + 1}"
IS_ROOT = os.geteuid() == 0
NO_ROOT = "a user of its own takes root, which this is not"

#: Tries the listed accesses, and prints each result.
SPY = """
import json, os, sys, subprocess
from pathlib import Path

def outcome(attempt):
    try:
        return str(attempt() or "done")
    except OSError as error:
        return type(error).__name__

Path("/tmp/mine").write_text("x")
seen = {path: outcome(lambda: open(path, "rb").read(1)) for path in sys.argv[1:]}
seen |= {"user": os.getuid(), "groups": os.getgroups(), "/tmp": os.listdir("/tmp")}
seen["root"] = outcome(lambda: os.setuid(0))
seen["folder"] = oct(Path(os.environ["HALFSTEP_RUN_FOLDER"]).stat().st_mode)
status = Path("/proc/self/status").read_text().splitlines()
seen["privileges"] = [line for line in status if line.startswith(("NoNewPrivs", "CapEff"))]
sleep = [sys.executable, "-c", "import time; time.sleep(999)"]
left = subprocess.Popen(sleep, start_new_session=True)
print("SPIED " + json.dumps(seen), flush=True)
"""
#: Starts more processes than allowed, and prints how many it started.
BOMB = """
import subprocess, sys
started = []
try:
    while True:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"]))
except OSError as error:
    sys.exit(f"STARTED {len(started)}: {error}")
"""


@pytest.fixture(scope="session")
def python() -> Iterator[Path]:
    """The system's Python with the packages of this one, which may be in root's home."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin")
    code = Path(worker.__file__).parents[1]
    if not set(run_users.PLACES).issubset(run_users.hidden([str(code)])):
        pytest.skip(f"{code} lies where a run would have a private folder, and so has none")
    if system is None:
        pytest.skip(f"there is no python{version} that every user can run")
    folder = Path(tempfile.mkdtemp(dir="/var/lib", prefix="halfstep-venv-"))
    folder.chmod(0o755)
    subprocess.run([system, "-m", "venv", "--without-pip", folder], check=True, umask=0o022)
    [packages] = folder.glob("lib/python*/site-packages")
    known = [sysconfig.get_path("purelib"), str(Path(worker.__file__).parents[1])]
    lines = [f"import site; site.addsitedir({each!r})" for each in known]
    (packages / "known.pth").write_text("\n".join(lines))
    (packages / "known.pth").chmod(0o644)
    yield folder / "bin" / "python"
    shutil.rmtree(folder)


@contextmanager
def _working(site: Site, python: Path, **environment: str) -> Iterator[int]:
    """Start a worker with this Python; yield its id."""
    environment = os.environ | site.environment | environment
    process = subprocess.Popen([python, "-m", "worker.worker"], env=environment)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(SECONDS)


@pytest.fixture
def passable(database: Database, database_url: str, ada: User) -> Iterator[Site]:
    """A site whose data folder other users may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(dir="/var/lib", prefix="halfstep-test-"))
    folder.chmod(0o711)
    (folder / "data").mkdir(mode=0o700)
    yield Site(folder / "data", database, database_url, ada)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason=NO_ROOT)
@pytest.mark.only_on("sqlite")
def test_a_run_with_a_user_of_its_own_reaches_nothing_else(passable: Site, python: Path) -> None:
    """A run as its own user accesses neither files of its worker, nor folders of other runs, nor
    /tmp. Its processes end with it, too many of them fail without affecting others, and a recipe
    trains under its own user.
    """
    assert sandbox.is_supported(), "this kernel has no Landlock, which Linux 6.2 has"
    site = passable
    for name, text in (("spy.py", SPY), ("bomb.py", BOMB)):
        (site.data.parent / name).write_text(text)
        (site.data.parent / name).chmod(0o644)
    asked = {"HALFSTEP_RUN_USERS": USERS, "HALFSTEP_RUN_PROCESSES": "24"}
    asked |= {
        "HALFSTEP_SANDBOX": "yes",
        "HALFSTEP_ALLOW_COMMANDS": "yes",
        "HALFSTEP_CPU_DEVICES": "2",
    }
    with _working(site, python, HALFSTEP_WARM_START="yes", **asked) as worker_pid:
        until(lambda: site.offers("digits"))
        with site.database.reading() as session:
            [(row, _)] = workers.all_workers(session)
        assert row.sandbox == {"users": "", "processes": ""}
        first = _wait(site, f"python {site.data.parent / 'bomb.py'}")
        other = site.data / "runs" / str(first)
        secret = site.data / "secrets.key"
        secret.write_text("key")
        secret.chmod(0o644)  # not even files that every user may read outside of the sandbox
        theirs = [f"/proc/{worker_pid}/environ", str(other / "job-1.json"), str(secret)]
        theirs += [site.url.removeprefix("sqlite:///"), str(other)]
        spied = _wait(site, " ".join(["python", str(site.data.parent / "spy.py"), *theirs]))
        trained = site.wait(site.submit(steps=3))
    bomb, spy = site.run(first), site.run(spied)
    assert (bomb.status, spy.status, trained.status) == (
        Status.FAILED,
        Status.FINISHED,
        Status.FINISHED,
    ), (spy.error, trained.error)
    assert "STARTED" in (bomb.error or "")
    [said] = [each for each in site.log(spied).splitlines() if each.startswith("SPIED ")]
    result = json.loads(said.removeprefix("SPIED "))
    assert result.pop("user") in Settings(run_users=USERS).run_user_range
    assert (result.pop("groups"), result.pop("/tmp")) == ([], ["mine"])
    assert result.pop("folder") == "0o42700"
    privileges = " ".join(result.pop("privileges")).split()
    assert privileges == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    assert {path: how for path, how in result.items() if how == "done"} == {}
    assert len(result) == len(theirs) + 1
    assert trained.step == 3
    log = site.data / "runs" / str(trained.id) / "supervisor-1.log"
    assert "starts as a program" not in log.read_text()  # but was forked, with that user
    for number in Settings(run_users=USERS).run_user_range:
        assert _processes_of(number) == []


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason=NO_ROOT)
@pytest.mark.only_on("sqlite")
def test_a_forked_run_with_a_user_of_its_own_is_isolated_like_a_fresh_one(
    passable: Site, python: Path
) -> None:
    """A forked run has the user, groups, privileges, limits, /tmp and access of a fresh one."""
    site = passable
    secret = site.data.parent / "secret"
    secret.write_text("key")
    secret.chmod(0o600)
    (site.data / "secrets.key").write_text("key")
    recipe = shutil.copy(DESCRIBED.partition(":")[0], site.data.parent)
    Path(recipe).chmod(0o644)
    asked = {"HALFSTEP_RUN_USERS": f"{FIRST}-{FIRST}", "HALFSTEP_RUN_PROCESSES": "24"}
    asked |= {"HALFSTEP_SANDBOX": "yes", "HALFSTEP_RECIPES": recipe}
    asked |= {"HALFSTEP_TEST_TRIED": f"{secret}:{site.data / 'secrets.key'}:/proc/1/environ"}
    described = []
    for start in ("yes", "no"):
        with _working(site, python, HALFSTEP_WARM_START=start, **asked):
            run_id = site.submit(recipe="described", steps=2)
            assert site.wait(run_id).status == Status.FINISHED, site.run(run_id).error
            log = site.data / "runs" / str(run_id) / "supervisor-1.log"
        described.append(description(site, run_id))
        assert "starts as a program" not in log.read_text()
    warm, cold = described
    for name, value in cold.items():
        assert warm[name] == value, name
    assert "\t".join(["Uid:", *[str(FIRST)] * 4]) in warm["status"]
    outcomes = " ".join(warm["tried"].values()).split()
    assert all(outcome.endswith("Error") for outcome in outcomes), warm["tried"]


def _wait(site: Site, line: str) -> int:
    with site.database.writing() as session:
        run_id = submit_command(session, site.owner, line).id
    site.wait(run_id)
    return run_id


def _processes_of(user: int) -> list[psutil.Process]:
    """Return the live processes of a user, without zombies."""
    return [each for each in psutil.process_iter() if _is_of(each, user)]


def _is_of(process: psutil.Process, user: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return user in process.uids() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.skipif(not IS_ROOT, reason=NO_ROOT)
def test_invalid_users_are_reported(tmp_path: Path) -> None:
    """Users without a sandbox, too few users for the devices, or an unreachable folder are
    reported.
    """
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    settings = Settings(data=closed / "data", run_users=USERS)
    assert "HALFSTEP_SANDBOX=yes" in run_users.obstacle(settings, 1)
    settings = settings.model_copy(update={"sandbox": True})
    assert "2 users are fewer than 3 devices" in run_users.obstacle(settings, 3)
    settings.data.mkdir()
    assert "PermissionError" in run_users.obstacle(settings, 2)


@pytest.mark.skipif(not IS_ROOT, reason=NO_ROOT)
def test_two_runs_never_have_the_same_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two data folders have different users; without a free user it raises."""
    settings = Settings(data=tmp_path / "one", run_users=USERS)
    first = run_users.RunUser.acquire(settings)
    assert first is not None
    assert first.number == FIRST
    with run_users.trial_user(settings) as tried:
        assert tried == FIRST + 1
    with subprocess.Popen(["sleep", "999"], user=first.number) as process:
        second = run_users.RunUser.acquire(Settings(data=tmp_path / "two", run_users=USERS))
        assert second is not None
        assert second.number == FIRST + 1
        with pytest.raises(run_users.NoneFree, match=USERS):
            run_users.RunUser.acquire(settings)
        with run_users.trial_user(settings) as tried:
            assert tried == FIRST
        assert process.poll() is None
        first.clear()
        assert _processes_of(FIRST) == []
    second.release()
    again = run_users.RunUser.acquire(settings)
    assert again is not None
    assert again.number == second.number
    for each in (first, again):
        each.release()
    for wrong in ("61001-61000", "1-99999", "0-5", "x"):
        monkeypatch.setenv("HALFSTEP_RUN_USERS", wrong)
        with pytest.raises(Invalid, match="HALFSTEP_RUN_USERS"):
            Settings.read()


def test_limits_are_written_into_a_cgroup_of_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has a cgroup next to the worker's, which is moved; a missing controller is named."""
    settings = Settings(run_memory_gib=1.5, run_processes=7, run_cpus=0.5)
    own = Path("/proc/self/cgroup").read_text()
    path = next(line[3:] for line in own.splitlines() if line.startswith("0::"))
    base = Path(os.path.normpath(f"{tmp_path}{path}"))
    base.mkdir(parents=True, exist_ok=True)
    assert "no cgroup v2" in cgroup_limits.obstacle(settings, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("")
    (base / "cgroup.controllers").write_text("cpu memory")
    assert cgroup_limits.obstacle(settings, tmp_path).endswith("has no controller pids")
    (base / "cgroup.controllers").write_text("cpu memory pids")
    (base / "cgroup.procs").write_text("1\n")
    assert cgroup_limits.obstacle(settings, tmp_path) == ""
    assert (base / "daemons" / "cgroup.procs").read_text() == "1"
    assert (base / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    monkeypatch.setattr(cgroup_limits, "_find_own_cgroup", lambda _root: base / "daemons")
    group = RunGroup(settings, "run-1-1-0", tmp_path)
    written = {each.name: each.read_text() for each in group.folder.iterdir()}
    assert written["memory.max"] == str(int(1.5 * 2**30))
    assert (written["pids.max"], written["cpu.max"]) == ("7", "50000 100000")
    assert written["memory.oom.group"] == "1"


@pytest.mark.only_on("sqlite")
def test_a_run_beyond_its_memory_affects_no_other(site: Site, tmp_path: Path) -> None:
    """A run beyond its memory limit is killed, and its worker continues with the next."""
    hog = tmp_path / "hog.py"
    hog.write_text("taken = bytearray(2**30)\nprint(len(taken))\n")
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes", HALFSTEP_RUN_MEMORY_GIB="0.2"):
        until(lambda: site.offers("digits"))
        with site.database.reading() as session:
            [(row, _)] = workers.all_workers(session)
        if row.sandbox["memory"]:
            pytest.skip(f"no limit of memory: {row.sandbox['memory']}")
        run = site.run(_wait(site, f"python {hog}"))
        assert site.run(_wait(site, "true")).status == Status.FINISHED
    assert "SIGKILL" in (run.stop_reason or "")


#: Names its threads, also in a program that it starts, and tries other files of /proc.
NAMES = """
import json, os, subprocess, sys
def opens(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
        return True
    except OSError:
        return False
own = "/proc/thread-self/comm"
code = f"import os; os.open({own!r}, os.O_WRONLY)"
started = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
kernel = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches"]
other = [f"/proc/{sys.argv[1]}/{each}" for each in ("mem", "comm", "environ")]
print(json.dumps([opens(own), started.returncode == 0, list(filter(opens, kernel + other))]))
"""


@pytest.mark.parametrize("in_namespaces", [False, True])
@pytest.mark.parametrize("has_user", [False, True])
def test_threads_can_be_named(
    tmp_path: Path, python: Path, has_user: bool, in_namespaces: bool
) -> None:
    """A run can name its own threads, as CUDA requires, and write nothing else in /proc."""
    if has_user and not IS_ROOT:
        pytest.skip(NO_ROOT)
    allowed = sandbox.Sandbox([], [str(tmp_path)], [], [], [], [], names_threads=True)
    isolation = Isolation(allowed, in_namespaces, user=FIRST if has_user else None)
    program = [*ISOLATED[1:], str(python), "-I", "-c", NAMES, str(os.getpid())]
    environment = {"PATH": os.defpath} | isolation.variable()
    ended = subprocess.run([python, *program], env=environment, capture_output=True, text=True)
    names_own, program_names_own, opened = json.loads(ended.stdout)
    could_write = IS_ROOT and not (has_user or in_namespaces)
    assert (names_own, program_names_own, opened) == (True, not could_write, [])
