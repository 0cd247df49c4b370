"""The operator's commands, run as from a terminal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import typer
from alembic import command
from obstore.store import LocalStore
from sqlalchemy import select, text, update

from app import commands
from db.database import Database, revisions
from db.errors import Conflict
from db.settings import Settings
from db.tables import AuditEvent, MetricBlock, MetricTail, Run, Status, StepBlock, StepBucket, User
from db.upgrade_estimate import Estimate
from tests.app.conftest import offer_digits, start_run
from tests.buckets import Bucket
from tests.db.telemetry.earlier_steps import as_file, rows_left
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.marks import extended
from tests.site import (
    GATED,
    SECONDS,
    Site,
    answers,
    free_port,
    halfstep,
    heed,
    is_running,
    type_command,
    until,
    up,
)

pytestmark = pytest.mark.slow


def test_up_serves_signs_in_and_stops_cleanly(tmp_path: Path) -> None:
    """`halfstep up` prints a link that signs in once, and stops by Ctrl-C or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with up(HALFSTEP_DATA=str(tmp_path)) as (process, link):
            base = link.split("/?")[0]
            until(lambda base=base: answers(base))
            with httpx2.Client(follow_redirects=True, timeout=SECONDS) as browser:
                given = {"token": link.partition("token=")[2]}
                assert "signs you in" in browser.get(link).text
                page = browser.post(base, data=given, headers={"Origin": base})
                assert (page.status_code, page.url.path) == (200, "/runs")
                assert browser.get(f"{base}/runs").url.path == "/runs"
            with httpx2.Client(follow_redirects=True, timeout=SECONDS) as stranger:
                spent = stranger.post(base, data=given, headers={"Origin": base})
                assert spent.url.path == "/sign-in"
                assert stranger.get(f"{base}/runs").url.path != "/runs"
            family = psutil.Process(process.pid).children(recursive=True)
            assert family
            process.send_signal(number)
            process.wait(SECONDS)
        assert process.returncode == 0
        assert not any(map(is_running, family))


@pytest.mark.extended
def test_a_link_leads_to_the_server_of_the_data_folder(tmp_path: Path) -> None:
    """`halfstep link` has the port of the running server, unless another is named or the server has
    ended or was killed.
    """
    environment, file = {"HALFSTEP_DATA": str(tmp_path)}, tmp_path / "server.json"
    with up(**environment) as (_process, link):
        base = link.split("/?")[0]
        assert f"{base}/?token=" in halfstep("link", "operator", **environment).stdout
        invited = halfstep("user", "add", "ada", **environment)
        assert f"{base}/?token=" in invited.stdout
        assert "Links to 127.0.0.1 open only on this machine" in invited.stderr
        other = halfstep("link", "operator", HALFSTEP_PORT="8123", **environment)
        assert "http://127.0.0.1:8123/?token=" in other.stdout
        public = environment | {"HALFSTEP_PUBLIC_URL": "https://train.example/halfstep/"}
        for words in (("link", "operator"), ("user", "add", "bob")):
            printed = halfstep(*words, **public)
            assert "Halfstep: https://train.example/halfstep/?token=" in printed.stdout
            assert printed.stderr == ""
        assert file.stat().st_mode & 0o777 == 0o600
        written = file.read_text()
    assert not file.exists()
    file.write_text(written)
    assert ":8000/?token=" in halfstep("link", "operator", **environment).stdout


def test_a_second_start_on_a_data_folder_says_where_halfstep_runs(tmp_path: Path) -> None:
    """A second `halfstep up` on a data folder names the address of the first, on any port."""
    with up(HALFSTEP_DATA=str(tmp_path)) as (_process, link):
        port = str(free_port())
        second = halfstep("up", HALFSTEP_DATA=str(tmp_path), HALFSTEP_PORT=port)
    assert second.returncode == 1
    base = link.split("/?")[0]
    assert f"Halfstep already runs on {tmp_path}, at {base}: `halfstep link NAME`" in second.stderr
    assert "WORKER_NAME" not in second.stderr


@pytest.mark.extended
@pytest.mark.parametrize("stop", [signal.SIGTERM, *extended([signal.SIGHUP])])
def test_whatever_stops_up_leaves_no_worker_behind(tmp_path: Path, stop: signal.Signals) -> None:
    """SIGTERM and a closed terminal end `halfstep up` and its worker, as Ctrl-C does."""
    for _ in range(2):
        with up(stop, HALFSTEP_DATA=str(tmp_path)) as (process, _link):
            until((tmp_path / f"worker-{socket.gethostname()}.lock").exists)
            family = psutil.Process(process.pid).children(recursive=True)
            assert family
        assert process.returncode == 0
        assert not any(map(is_running, family))


def test_up_continues_after_a_kill(site: Site) -> None:
    """The worker is killed with `halfstep up`, so the next one takes its name and continues its
    trainings.
    """
    gated = {"HALFSTEP_RECIPES": GATED, "HALFSTEP_GATE": str(site.gate)}
    run_id = site.submit(recipe="gated")
    with up(**site.environment, **gated) as (process, _link):
        site.wait_for_step(run_id, 1)
        [worker] = psutil.Process(process.pid).children()
        training = site.training(run_id)
        process.kill()
        until(lambda: not is_running(worker))
    assert is_running(training)
    with up(**site.environment, **gated):
        site.open_gate()
        site.wait(run_id, Status.FINISHED)
    assert site.run(run_id).attempt == 1


@pytest.mark.extended
def test_up_with_a_closed_terminal_leaves_no_worker_behind(tmp_path: Path) -> None:
    """`halfstep up | head` leaves no worker behind."""
    with up(signal.SIGTERM, HALFSTEP_DATA=str(tmp_path)) as (process, _link):
        until((tmp_path / f"worker-{socket.gethostname()}.lock").exists)
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.stdout.close()
    assert process.returncode == 0
    assert not any(map(is_running, family))


def test_written_files_are_private(site: Site) -> None:
    """Other users can read neither database nor runs' files and folders."""
    data = site.data / "data"
    environment = {"HALFSTEP_DATA": str(data), "HALFSTEP_WORKER_NAME": "w1"}
    database = Database(f"sqlite:///{data / 'halfstep.db'}")
    assert halfstep("migrate", **environment).returncode == 0
    assert "/?token=" in halfstep("link", "ada", **environment).stdout
    own = Site(data, database, str(database.engine.url), site.owner)
    with own.worker():
        run_id = own.submit(steps=20)
        own.wait(run_id)
    files = [data, *data.rglob("*")]
    assert {path.name for path in files} > {"halfstep.db", "checkpoints", "supervisor-1.log"}
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    database.dispose()


def test_up_stops_cleanly_before_the_worker_is_ready(tmp_path: Path) -> None:
    """Ctrl-C right after `halfstep up` prints the link exits with 0 and leaves no process
    behind.
    """
    with up(HALFSTEP_DATA=str(tmp_path)) as (process, _link):
        family = psutil.Process(process.pid).children(recursive=True)
    assert process.returncode == 0
    assert not any(map(is_running, family))


def _workers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [each for each in children if each.cmdline()[0] == "halfstep: worker"]


@pytest.mark.extended
def test_up_prints_no_link_if_its_worker_has_ended(tmp_path: Path) -> None:
    """If the worker dies while the server loads, `halfstep up` says so and prints no link."""
    port = {"HALFSTEP_PORT": str(free_port()), "HALFSTEP_DATA": str(tmp_path)}
    process = subprocess.Popen(  # with its modules still to load, unlike tests.warm
        [sys.executable, "-m", "halfstep.cli.main", "up"],
        env=os.environ | port,
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: bool(_workers(process.pid)))
    [worker] = _workers(process.pid)
    worker.kill()
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    sentence = "The worker was killed by SIGKILL, so the server stops too."
    assert printed == f"{sentence} Runs continue when it is started again.\n"


@pytest.mark.extended
@pytest.mark.parametrize("stop", [signal.SIGTERM, *extended([signal.SIGINT, signal.SIGHUP])])
def test_up_stops_cleanly_while_the_server_loads(tmp_path: Path, stop: signal.Signals) -> None:
    """A signal while the server's modules load also ends the worker, which was started before."""
    port = {"HALFSTEP_PORT": str(free_port()), "HALFSTEP_DATA": str(tmp_path)}
    with heed(stop):
        process = subprocess.Popen(  # with its modules still to load, unlike tests.warm
            [sys.executable, "-m", "halfstep.cli.main", "up"],
            env=os.environ | port,
            stdout=subprocess.PIPE,
            text=True,
        )

    until(lambda: bool(_workers(process.pid)))
    family = _workers(process.pid)
    process.send_signal(stop)
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert printed == ""
    assert not list(tmp_path.glob("worker-*.lock"))
    assert not any(map(is_running, family))


@pytest.mark.extended
def test_up_starts_without_standard_input(tmp_path: Path) -> None:
    """`halfstep up` starts if a process manager has closed its standard input."""
    port = {"HALFSTEP_PORT": str(free_port()), "HALFSTEP_DATA": str(tmp_path)}
    command = 'exec "$0" -m halfstep.cli.main up <&-'
    with heed(signal.SIGTERM):
        process = subprocess.Popen(["sh", "-c", command, sys.executable], env=os.environ | port)
    until((tmp_path / f"worker-{socket.gethostname()}.lock").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0


def test_port_in_use_is_named(tmp_path: Path) -> None:
    """A port in use is reported in one sentence with the setting, before the worker starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = halfstep("up", HALFSTEP_DATA=str(tmp_path), HALFSTEP_PORT=port)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"halfstep: HALFSTEP_PORT: cannot listen on 127.0.0.1:{port}")
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.glob("worker-*.lock"))


@pytest.mark.parametrize("data", ["/proc/halfstep", "/dev/null/halfstep"])
def test_folder_that_cannot_be_written_is_named(data: str) -> None:
    """For a data folder without write permission one sentence with its name is printed."""
    ended = halfstep("up", HALFSTEP_DATA=data)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"halfstep: HALFSTEP_DATA: {data} cannot be written")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://h:sesame@127.0.0.1:9/x", "127.0.0.1:9/x does not answer"),
        ("mysql://h@localhost/x", "neither sqlite nor postgresql"),
    ],
)
def test_database_that_does_not_answer_is_named(tmp_path: Path, url: str, message: str) -> None:
    """A wrong database URL ends in one sentence, without the password."""
    for word in ("up", "server", "worker", "migrate"):
        ended = halfstep(word, HALFSTEP_DATA=str(tmp_path), HALFSTEP_DATABASE_URL=url)
        assert ended.returncode == 1
        assert message in ended.stderr
        assert "HALFSTEP_DATABASE_URL" in ended.stderr
        assert "sesame" not in ended.stderr + ended.stdout
        assert "Traceback" not in ended.stderr


@pytest.mark.xdist_group("bucket")
@pytest.mark.parametrize("word", ["server", *extended(["worker"])])
def test_a_missing_bucket_is_named(bucket: Bucket, tmp_path: Path, word: str) -> None:
    """The command ends with the reason for a missing bucket before anything is served or
    claimed.
    """
    url = {"HALFSTEP_STORAGE_URL": "s3://nobody-has-made-it"}
    ended = halfstep(word, HALFSTEP_DATA=str(tmp_path), **url)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert (
        "HALFSTEP_STORAGE_URL: the bucket cannot be listed: NoSuchBucket: The specified bucket"
        in said
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("PORT", "99999", "65535"), ("CPU_DEVICES", "two", "whole"), ("LEASE_SECONDS", "0", "0")],
)
def test_setting_out_of_range_is_named(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    """An invalid setting ends with one message that has its name, value and the allowed values."""
    ended = halfstep("migrate", HALFSTEP_DATA=str(tmp_path), **{f"HALFSTEP_{name}": value})
    assert ended.returncode == 1
    assert f"HALFSTEP_{name}" in ended.stderr
    assert value in ended.stderr
    assert allowed in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_link_creates_only_the_first_user(tmp_path: Path) -> None:
    """The link creates only the first account, not one for a mistyped name, and is audited."""
    environment = {"HALFSTEP_DATA": str(tmp_path)}
    halfstep("migrate", **environment)
    assert "1 to 64 are allowed" in halfstep("link", "x" * 65, **environment).stderr
    assert "/?token=" in halfstep("link", "bob", **environment).stdout
    ended = halfstep("link", "bbo", **environment)
    assert "There is no user 'bbo': `halfstep user add NAME` creates one." in ended.stderr
    database = Database(f"sqlite:///{tmp_path / 'halfstep.db'}")
    with database.reading() as session:
        assert session.scalars(select(User.name)).all() == ["bob"]
        action = session.scalars(select(AuditEvent)).one()
    database.dispose()
    assert (action.action, action.detail, action.address) == ("halfstep link", "bob", "terminal")


def test_commands_for_an_installation_make_none(tmp_path: Path) -> None:
    """Commands for an installation report that a folder has none, and create no empty database."""
    for words in (("link", "bob"), ("backup", "here"), ("rebuild", "1"), ("storage", "check")):
        ended = halfstep(*words, HALFSTEP_DATA=str(tmp_path / "data"))
        assert ended.returncode == 1
        assert "There is no installation here" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_sql_of_migrations_is_printed_for_postgresql(site: Site) -> None:
    """The SQL of migrations for PostgreSQL is printed without an installation; for SQLite the
    command says that there is none.
    """
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    ended = halfstep("migrate", "--sql", **environment)
    if site.url.startswith("sqlite"):
        assert re.fullmatch(
            r"halfstep: --sql: sqlite:.* has no SQL to print; use PostgreSQL "
            r"\(HALFSTEP_DATABASE_URL\)\n",
            ended.stderr,
        )
        assert ended.returncode == 1
    else:
        assert "CREATE TABLE runs" in ended.stdout


def test_backup_migrates_nothing(site: Site, tmp_path: Path) -> None:
    """A backup before an upgrade has the old schema; `halfstep migrate` is separate."""
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    command.downgrade(site.database.migrations(), "0036")
    ended = halfstep("backup", str(tmp_path / "backup"), **environment)
    assert "has an older version of the tables: run `halfstep migrate` first" in ended.stderr
    assert not site.database.is_current()


def test_due_migrations_are_printed_without_a_change(site: Site) -> None:
    """`migrate --check` prints due migrations and the space for a SQLite copy, without a change."""
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    assert "No migration is due." in halfstep("migrate", "--check", **environment).stdout
    before, newest = revisions()[-2:]
    command.downgrade(site.database.migrations(), before)
    ended = halfstep("migrate", "--check", "--json", **environment)
    found = json.loads(ended.stdout)
    assert (found["revision"], found["due"]) == (before, [newest])
    assert (found["needed_bytes"] > 0) == site.url.startswith("sqlite")
    assert site.database.revision() == before


def test_an_upgrade_that_cannot_begin_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without space the upgrade check exits with 1; a newer version's database is refused."""
    monkeypatch.setenv("HALFSTEP_DATA", str(site.data))
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", site.url)
    command.downgrade(site.database.migrations(), revisions()[-2])
    monkeypatch.setattr(commands, "estimate", lambda *_, **__: Estimate(conversion_bytes=2000))
    monkeypatch.setattr(commands, "measure_free_bytes", lambda _database: 1000)
    with pytest.raises(typer.Exit) as ended:
        commands._print_due_migrations(as_json=False)
    assert ended.value.exit_code == 1
    assert "1.95 KiB needed, 1,000 B free.\nFree space on it" in capsys.readouterr().out
    with site.database.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Conflict, match=r"has revision 9999; this version can open"):
        commands._print_due_migrations(as_json=False)


def test_backup_and_storage_check_from_the_command(site: Site, tmp_path: Path) -> None:
    """Backup and storage check by command print their results and errors."""
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    folder = str(tmp_path / "backup")
    result = halfstep("backup", folder, **environment).stdout
    assert "0 files" in result
    assert "not included: files of the data folder that no run names" in result
    assert "exists already" in halfstep("backup", folder, **environment).stderr
    ended = halfstep("backup", "/proc/x", **environment)
    assert ended.returncode == 1
    assert "folder: /proc/x cannot be written" in ended.stderr
    with site.database.reading() as session:
        assert session.scalars(select(AuditEvent.action)).all() == ["halfstep backup"]
    assert "0 do not match" in halfstep("storage", "check", "--deep", **environment).stdout
    other = {"HALFSTEP_DATA": str(tmp_path / "other")}
    assert "0 files restored" in halfstep("restore", folder, **other).stdout


def test_rebuild_recomputes_the_summary(site: Site) -> None:
    """`rebuild` restores the same summaries; an unknown run is named."""
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    offer_digits(site.database)
    running = start_run(site.database, site.owner)
    record(site.database, running, make_steps([1.0] * 9000, skipped=[7, 70]))
    stones = select(StepBucket.size, StepBucket.bucket, StepBucket.summary)
    with site.database.writing() as session:
        before = set(session.execute(stones).all())
        session.execute(update(StepBucket).values(summary=b""))
    ended = halfstep("rebuild", "1", **environment)
    assert "9,000 steps, 2 of them skipped" in ended.stdout
    with site.database.reading() as session:
        assert set(session.execute(stones).all()) == before
    ended = halfstep("rebuild", "7", **environment)
    assert ended.returncode == 1
    assert ended.stderr == "halfstep: There is no run 7.\n"


def test_a_lost_file_of_steps_is_named_by_commands(site: Site) -> None:
    """A wrong data folder causes no deletion of records; `rebuild` converts the run first."""
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    offer_digits(site.database)
    running = start_run(site.database, site.owner)
    record(site.database, running, make_steps([1.0] * 700))
    key = as_file(site.database, LocalStore(site.data), running)
    (site.data / "steps").rename(site.data / "away")
    ended = halfstep("storage", "check", "--mend", **environment)
    assert (ended.returncode, "no file of steps, but 1 are" in ended.stderr) == (1, True)
    assert "has no file in the folder 'steps'" in halfstep("rebuild", "1", **environment).stderr
    ended = halfstep("backup", str(site.data / "none"), **environment)
    assert (ended.returncode, "no file in the folder 'steps'" in ended.stderr) == (1, True)
    assert not (site.data / "none").exists()
    (site.data / "away").rename(site.data / "steps")
    (site.data / key).rename(site.data / "kept")
    (site.data / key).write_bytes(b"damaged")
    ended = halfstep("backup", str(site.data / "damaged"), **environment)
    assert (ended.returncode, key in ended.stdout) == (1, True)
    (site.data / "kept").replace(site.data / key)
    assert halfstep("rebuild", "1", **environment).returncode == 0
    assert rows_left(site.database, running) == []
    assert not (site.data / key).exists()


def test_a_deep_check_names_damaged_blocks(site: Site, tmp_path: Path) -> None:
    """A deep check exits with 1 for damaged blocks, also with --mend because nothing can restore
    them, and so does a backup.
    """
    environment = {"HALFSTEP_DATA": str(site.data), "HALFSTEP_DATABASE_URL": site.url}
    offer_digits(site.database)
    running = start_run(site.database, site.owner)
    points = [make_metric(step, 0.5) for step in range(17_000)]
    record(site.database, running, make_steps([1.0] * 9000), events=points)
    record(site.database, running, events=[make_metric(17_000, 0.5)])
    assert "0 do not match" in halfstep("storage", "check", "--deep", **environment).stdout
    with site.database.writing() as session:
        its = StepBlock.first == 4096
        session.execute(update(StepBlock).where(its).values(data=b"x" * 100))
        of_metric = MetricBlock.first == 2048
        session.execute(update(MetricBlock).where(of_metric).values(data=b"x" * 100))
        session.execute(update(MetricTail).values(data=b"x" * 100))
    assert halfstep("storage", "check", **environment).returncode == 0
    ended = halfstep("storage", "check", "--deep", "--mend", **environment)
    with site.database.reading() as session:
        assert "val/accuracy" in session.get_one(Run, running.id).damage
    assert "run 1: steps 4,096 to 8,191: damaged" in ended.stdout
    assert "run 1: val/accuracy at steps 2,048 to " in ended.stdout
    assert "run 1: a flush of logged metrics: damaged" in ended.stdout
    assert ended.returncode == 1
    ended = halfstep("backup", str(tmp_path / "backup"), "--json", "--verify", **environment)
    assert (ended.returncode, len(json.loads(ended.stdout)["damaged"])) == (1, 3)


def test_what_operators_read_is_json_too(
    database: Database,
    settings: Settings,
    ada: User,
    running: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --json each command prints its figures as one object per line, asks nothing, and prints
    nothing else.
    """
    monkeypatch.setenv("HALFSTEP_DATA", str(settings.data))
    monkeypatch.setenv("HALFSTEP_DATABASE_URL", settings.database_url)

    def report(*words: str) -> list[dict[str, Any]]:
        assert type_command(*words, "--json") == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    run, summed = report("storage", "runs")
    assert (run["run"], run["owner"], run["stored_bytes"]) == (running.id, "ada", 0)
    assert (summed["runs"], summed["trash"]) == (1, {"runs": 0, "stored_bytes": 0})
    assert summed["disk"]["total_bytes"] >= summed["disk"]["free_bytes"]
    assert report("storage", "check") == [{"mismatches": 0}]
    pruned = report("storage", "prune", "--logs", "1", "--dry-run")
    assert pruned == [{"runs": 0, "stored_bytes": 0}]
    [rebuilt] = report("rebuild", str(running.id))
    assert (rebuilt["run"], rebuilt["skipped"]) == (running.id, 0)
    [link] = report("link", "ada")
    assert link["name"] == "ada"
    assert "/?token=" in link["link"]
    [made] = report("user", "add", "carol")
    assert made["name"] == "carol"
    assert report("user", "role", "carol", "viewer")[0]["role"] == "viewer"
    assert report("user", "change", "carol", "commands")[0]["change"] == "commands"
    _ada, carol = report("user", "list")
    assert carol == {
        **{"name": "carol", "roles": {"": "viewer"}, "admin": False},
        **{"runs_commands": True, "deactivated": False},
    }
    [saved] = report("backup", str(tmp_path / "backup"))
    assert (saved["files"], saved["left_out"]) == (0, [])
    assert saved["rows"] > 0
    [gone] = report("storage", "prune", "--logs", "0", "--yes")[-1:]
    with database.reading() as session:
        audit_events = session.scalars(select(AuditEvent.action).order_by(AuditEvent.id)).all()
    assert {"halfstep backup", "halfstep rebuild"} <= {*audit_events}
    assert (audit_events[-1] == "halfstep storage prune") == ("pruned" in gone)
