"""Commands as real processes of a real worker, with real databases."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import halfstep
from db.access import secrets
from db.files import checkpoints
from db.queue import run_control
from db.runs import environments, runs
from db.settings import Settings
from db.tables import Status
from halfstep.cli.command_sources import sources_of
from tests.db.conftest import submit_command
from tests.marks import extended
from tests.site import Site, is_running, until

#: Writes a file when it has begun, then executes the rest of the line.
SLEEPS = "import sys, time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def worker(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that offers commands."""
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes", HALFSTEP_STOP_GRACE_SECONDS="2") as process:
        yield process


def submit(site: Site, *words: str, **changes: Any) -> int:
    """Queue a command with these arguments."""
    line = " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words)
    with site.database.writing() as session:
        return submit_command(session, site.owner, line, **changes).id


def python(site: Site, code: str, **changes: Any) -> int:
    return submit(site, "python", "-c", code, **changes)


def last_reason(site: Site, run_id: int) -> tuple[str, str | None]:
    with site.database.reading() as session:
        row = runs.statuses(session, run_id)[-1]
        return row.reason or "", row.failure_kind


def test_a_command_gets_its_parameters_its_environment_and_no_credentials(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter is one argument; allowed variables are passed; secrets are set and hidden."""
    monkeypatch.setenv("PGPASSWORD", "sesame")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    settings = Settings(data=site.data, database_url=site.url)
    with site.database.writing() as session:
        secrets.put(session, settings.secrets_key, site.owner, "API_KEY", "open-sesame")
        secrets.put(session, settings.secrets_key, site.owner, "LONGER", "open-sesame-and-more")
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
    run_id = submit(
        site,
        *("python", "-c", code, "--lr={lr}", "{text}", "{flag}", "{{lr}}"),
        config={"lr": 1e-05, "text": "a b; $HOME {lr}", "flag": True},
        variables={"COLOUR": "blue"},
        secrets=["API_KEY", "LONGER"],
    )
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        assert site.wait(run_id).status == Status.FINISHED
    [said] = [line for line in site.log(run_id).splitlines() if line.startswith("[[")]
    words, environment, folder = json.loads(said)
    assert words == ["--lr=1e-05", "a b; $HOME {lr}", "true", "{lr}"]
    assert environment["COLOUR"] == "blue"
    assert (environment["API_KEY"], environment["LONGER"]) == ("***", "***")
    assert environment["HALFSTEP_RUN"] == str(run_id)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "sesame" not in site.log(run_id)
    assert not {"HALFSTEP_DATABASE_URL", "HALFSTEP_PARENT_PID", "HALFSTEP_DATA"} & set(environment)
    assert folder == str(site.scratch(run_id) / "work")
    with site.database.reading() as session:
        noted = environments.newest(session, run_id)
        assert noted is not None
        assert "sesame" not in json.dumps(noted.content)
        assert noted.content["command"][3:] == words
    folders = [site.data / name / str(run_id) for name in ("runs", "scratch")]
    written = [path for each in folders for path in each.rglob("*") if path.is_file()]
    assert not any(b"open-sesame" in path.read_bytes() for path in written)


def test_a_script_that_was_edited_while_it_was_queued_is_named(site: Site, tmp_path: Path) -> None:
    """Log and page name files that were edited since the submission; the script runs as it is."""
    (tmp_path / "train.py").write_text("print('as submitted')")
    (tmp_path / "lib.py").write_text("")
    sources = sources_of(["python", "train.py"], str(tmp_path))
    edited = submit(site, "python", "train.py", folder=str(tmp_path), sources=sources)
    (tmp_path / "train.py").write_text("print('edited')")
    current = sources_of(["python", "train.py"], str(tmp_path))
    same = submit(site, "python", "train.py", folder=str(tmp_path), sources=current)
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        for run_id in (edited, same):
            assert site.wait(run_id).status == Status.FINISHED
    assert "files differ from when the command was queued" in site.log(edited)
    assert "edited" in site.log(edited)
    assert "differ" not in site.log(same)
    with site.database.reading() as session:
        noted = [environments.newest(session, run_id) for run_id in (edited, same)]
        assert [row and row.content["changed_sources"] for row in noted] == [["train.py"], []]


def test_an_exit_code_fails_the_run_with_its_last_output(
    site: Site, worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A command's exit code, or a missing program, variable or folder, fails the run as code."""
    broken = python(site, "print('half way'); raise SystemExit('no such data')")
    missing = submit(site, "no-such-program")
    no_venv = python(site, "", venv="/nowhere")
    no_folder = python(site, "", folder="/nowhere/at/all")
    no_secret = python(site, "", secrets=["GONE"])
    script = tmp_path / "train.sh"
    script.write_bytes(b"#!/bin/sh\r\ntrue\r\n")
    script.chmod(0o755)
    converted = submit(site, str(script))
    fine = python(site, "print('well')")
    assert site.wait(fine).status == Status.FINISHED
    assert site.history(fine) == ["queued", "starting", "running", "finished"]
    for run_id, text, failure_kind in (
        (broken, "the command exited with code 1; last line: no such data", "code"),
        (missing, "there is no program no-such-program in the PATH of this worker", "settings"),
        (no_venv, "/nowhere is no virtual environment on this worker", "settings"),
        (no_folder, "there is no folder /nowhere/at/all on this worker", "settings"),
        (no_secret, "secret GONE no longer exists", "infrastructure"),
        (converted, "ends with a carriage return; convert the file to Unix line ends", "code"),
    ):
        run = site.run(run_id)
        assert (run.status, run.attempt) == (Status.FAILED, 1)
        assert (text in last_reason(site, run_id)[0], last_reason(site, run_id)[1]) == (
            True,
            failure_kind,
        )
    assert "half way" in (site.run(broken).error or "")


def test_a_cancel_is_sigterm_and_after_the_grace_sigkill(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    """A cancelled command gets SIGTERM, and SIGKILL after the grace period."""
    respects = (
        "import signal, sys; signal.signal(15, lambda *_: (print('bye'), sys.exit(7)));" + SLEEPS
    )
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
    child += f"time.sleep(600)', {str(site.data)!r}]);"
    ignores = f"{child} import signal; signal.signal(15, signal.SIG_IGN);" + SLEEPS
    for code, said in ((respects, "bye"), (ignores, "begun")):
        run_id = python(site, code)
        until(lambda run_id=run_id: "begun" in site.log(run_id))  # type: ignore[misc]
        with site.database.writing() as session:
            run_control.cancel(session, run_id, site.owner)
        assert site.wait(run_id).status == Status.CANCELLED
        assert said in site.log(run_id)
        assert last_reason(site, run_id) == ("cancelled by ada", None)


def test_killed_commands_are_queued_again_and_start_over(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    """A killed command, or one whose supervisor was killed, is queued and starts over."""
    code = "import os; print('attempt', os.environ['HALFSTEP_ATTEMPT'], flush=True);"
    code += "os.environ['HALFSTEP_ATTEMPT'] == '3' and exit(0);" + SLEEPS
    run_id = python(site, code)
    until(lambda: "attempt 1" in site.log(run_id) and "begun" in site.log(run_id))
    [command] = site.training(run_id).children()
    command.kill()
    until(lambda: "attempt 2" in site.log(run_id))
    with site.database.reading() as session:
        reasons = [row.reason or "" for row in runs.statuses(session, run_id)]
    assert "the command was killed by SIGKILL" in reasons
    [command] = site.training(run_id).children()
    os.kill(site.supervisor_pid(run_id, 2), signal.SIGKILL)
    run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 3)
    assert not is_running(command)
    assert "The command starts again" in site.log(run_id)


def test_a_worker_that_stops_gives_its_command_back(site: Site) -> None:
    """A stopping worker ends its command by SIGTERM, and the run keeps its position."""
    run_id = python(site, SLEEPS)
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        until(lambda: "begun" in site.log(run_id))
    run = site.run(run_id)
    assert (run.status, run.attempt) == (Status.QUEUED, 1)
    assert last_reason(site, run_id) == ("its worker was stopped", "infrastructure")


def test_a_worker_without_permission_takes_no_commands(site: Site) -> None:
    """A worker without permission for commands trains recipes, and claims no command."""
    command, digits = python(site, "print('no')"), site.submit(steps=1)
    with site.worker():
        assert site.wait(digits).status == Status.FINISHED
    assert site.run(command).status == Status.QUEUED


SCRIPT = """
import os, sys, torch, halfstep
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=50)
config = {"lr": 9, "model": {"width": 8}, "key": os.environ.get("API_KEY")}
watch = halfstep.watch(net, config=config)
for step in range(30):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
watch.log({"val/loss": 0.5, "note": "a text"})
torch.save(net.state_dict(), "net.pt")
watch.checkpoint("net.pt")
raise SystemExit("over" if "fail" in sys.argv else 0)
"""


@pytest.mark.only_on("sqlite")  # rows are the recorder's, whose own tests are on both
@pytest.mark.parametrize("end", ["", *extended(["fail"])])
def test_a_script_that_watches_itself_is_the_runs_own_row(
    site: Site, tmp_path: Path, end: str
) -> None:
    """A command's watched script records into its queued run, and creates no other."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    config = {"folder": str(folder), "config": {"lr": 0.01}}
    settings = Settings(data=site.data, database_url=site.url)
    with site.database.writing() as session:
        secrets.put(session, settings.secrets_key, site.owner, "API_KEY", "open-sesame")
    run_id = submit(site, "python", "train.py", "{lr}", end, secrets=["API_KEY"], **config)
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        run = site.wait(run_id)
    assert (run.step, run.precision) == (30, "fp16")
    assert run.status == (Status.FAILED if end else Status.FINISHED)
    assert last_reason(site, run_id)[0].endswith("over") == bool(end)
    assert site.count_steps(run_id) == 30
    assert run.skipped > 0
    assert run.scale is not None
    assert run.loss is not None
    assert run.config == {"lr": 0.01}
    assert run.whole_config == {"lr": 0.01, "model": {"width": 8}, "key": "***"}
    with site.database.reading() as session:
        assert [each.kind for each in checkpoints.of_run(session, run_id)] == ["checkpoint"]
        assert len(runs.newest(session)) == 1
    stored = site.data / "runs" / str(run_id) / "checkpoints" / "step-00000030" / "net.pt"
    assert stored.read_bytes() == (folder / "net.pt").read_bytes()


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("rank", ["1", *extended(["0"])])
def test_a_script_uses_artifacts_of_its_runs_project(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """A command's script uses artifacts of its run's project, on any rank."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data.txt").write_text("of vision")
    options: dict[str, Any] = {"console": False, "system": False, "mode": "offline"}
    with halfstep.watch(project="vision", folder=tmp_path / "runs", **options) as watch:
        watch.save_artifact(tmp_path / "data.txt", name="digits")
    code = "import halfstep; print(halfstep.watch().use('digits').read_text())"
    variables = {"HALFSTEP_CACHE": str(tmp_path / "cache"), "RANK": rank}
    run_id = python(site, code, variables=variables, project="vision")
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        run = site.wait(run_id)
    assert run.status == Status.FINISHED, site.log(run_id)
    assert "of vision" in site.log(run_id).splitlines()


@pytest.mark.extended
@pytest.mark.only_on("sqlite")
def test_a_run_with_a_damaged_spool_names_lost_data(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    """A command that succeeds with a damaged spool has failed, and is not killed."""
    damages = f"""
watch.finish()
import glob
for path in glob.glob({str(site.data / "scratch" / "*" / "*" / "spool" / "*.spool")!r}):
    with open(path, "ab") as file:
        file.write((10).to_bytes(4, "little") + bytes([2, 0, 0, 0, 1, 2, 3, 4]) + bytes(10))
print("trained to the end")
"""
    code = SCRIPT.replace("raise SystemExit", damages + "raise SystemExit")
    run_id = python(site, code.replace("sys.argv[1]", "'0.1'"))
    run = site.wait(run_id)
    assert (run.status, run.step) == (Status.FAILED, 30)
    reason, failure_kind = last_reason(site, run_id)
    assert reason.startswith("22 bytes of its spool were damaged: what they held is lost")
    assert failure_kind == "infrastructure"
    log = site.log(run_id)
    assert "trained to the end" in log
    assert "22 damaged bytes of the spool" in log


@pytest.mark.extended
@pytest.mark.only_on("sqlite")
def test_the_next_attempt_of_a_watched_script_replaces_what_the_last_one_made(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    """The next attempt's steps replace those of the killed one, from the first step on."""
    dies = "if step == 20 and __import__('os').environ['HALFSTEP_ATTEMPT'] == '1':\n"
    dies += "        __import__('os').kill(0, 9)\n    with torch.autocast"
    code = SCRIPT.replace("with torch.autocast", dies).replace(
        "range(30)", "range(int(sys.argv[2]))"
    )
    (site.data.parent / "train.py").write_text(code.replace("argv[2]", "argv[-1]"))
    run_id = submit(
        site, "sh", "-c", f"python {site.data.parent}/train.py 0.1 $((50 / HALFSTEP_ATTEMPT))"
    )
    site.wait_for_step(run_id, 5)
    run = site.wait(run_id)
    assert (run.status, run.attempt, run.step) == (Status.FINISHED, 2, 25)
    assert site.count_steps(run_id) == 25


def test_a_commit_is_checked_out(site: Site, tmp_path: Path) -> None:
    """A commit is checked out by its hash or a prefix; an invalid one fails the run."""
    repository = tmp_path / "repository"
    (repository / "src").mkdir(parents=True)

    def git(*words: str) -> str:
        options = ["-c", "user.name=ada", "-c", "user.email=ada@localhost"]
        command = ["git", *options, "-C", str(repository), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    hashes = []
    for word in ("first", "second"):
        (repository / "src" / "say.py").write_text(f"print('the {word}')")
        git("add", ".")
        git("commit", "--quiet", "-m", word)
        hashes.append(git("rev-parse", "HEAD"))
    git("branch", "abcdef0")
    at = {"git": f"file://{repository}"}
    first = submit(site, "python", "src/say.py", commit=hashes[0][:8], **at)
    second = submit(site, "python", "say.py", commit=hashes[1], folder="src", **at)
    branch = submit(site, "python", "say.py", commit="abcdef0", **at)
    unknown = submit(site, "python", "say.py", commit="0123456789", **at)
    nowhere = submit(site, "python", "say.py", git=f"file://{tmp_path}/none", commit="01234567")
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        assert [site.wait(run_id).status for run_id in (first, second)] == ["finished"] * 2
        assert [site.wait(each).status for each in (branch, unknown, nowhere)] == ["failed"] * 3
    assert "the first" in site.log(first)
    assert hashes[0] in site.log(first)
    with site.database.reading() as session:
        noted = environments.newest(session, first)
        assert noted is not None
        assert noted.content["git"]["commit"] == hashes[0]
        assert noted.content["command"] == ["python", "src/say.py"]
        assert environments.texts(noted).source == "print('the first')"
        assert environments.texts(noted).diff is None
    assert "the second" in site.log(second)
    assert "has no commit abcdef0" in last_reason(site, branch)[0]
    assert "has no commit 0123456789" in last_reason(site, unknown)[0]
    assert "none' does not appear to be a git repository" in last_reason(site, nowhere)[0]
    assert last_reason(site, nowhere)[1] == "settings"


@pytest.mark.only_on("sqlite")
def test_a_clone_that_hangs_can_be_cancelled(site: Site, worker: subprocess.Popen[bytes]) -> None:
    """During a clone that hangs the lease is renewed, and a cancel ends git."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/it"
        run_id = submit(site, "python", "it.py", git=url, commit="01234567")
        connection, _address = silent.accept()
        with site.database.writing() as session:
            run_control.cancel(session, run_id, site.owner)
        assert site.wait(run_id).status == Status.CANCELLED
        connection.close()
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not any(url in command for command in commands)


@pytest.mark.extended
@pytest.mark.only_on("sqlite")
def test_several_devices_are_a_gang_of_torchruns(site: Site) -> None:
    """A command on several devices has ranks by torchrun; a killed one is an infrastructure
    failure.
    """
    code = site.data.parent / "rank.py"
    code.write_text(
        "import os, sys\n"
        "rank, ranks = os.environ['RANK'], os.environ['WORLD_SIZE']\n"
        "os.write(1, f'rank {rank} of {ranks} {sys.argv[1:]}\\n'.encode())  # a line stays whole\n"
        "if os.environ['RANK'] == '1' and os.environ['HALFSTEP_ATTEMPT'] == '1':\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    run_id = submit(site, "python", str(code), "a b", devices_per_node=2)
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes", HALFSTEP_CPU_DEVICES="2"):
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 2)
    assert {"rank 0 of 2 ['a b']", "rank 1 of 2 ['a b']"} <= set(site.log(run_id).splitlines())
    with site.database.reading() as session:
        reasons = [row.reason or "" for row in runs.statuses(session, run_id)]
    assert "the command was killed by SIGKILL" in reasons
