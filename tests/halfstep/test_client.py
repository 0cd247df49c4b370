"""The client and its commands, against a real server."""

import gzip
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from db.access import projects
from db.database import Database
from db.files import artifacts, checkpoints
from db.queue import queue
from db.runs import environments, runs
from db.settings import Settings
from db.tables import CheckpointFile, LogLine, Run, Status, User
from halfstep import ApiError, Client
from halfstep.api_client import credentials
from halfstep.api_client.credentials import Credentials
from halfstep.cli import main
from halfstep.telemetry.flags import NONFINITE_LOSS
from tests.app.compare.seeds_made import two_precisions
from tests.app.conftest import serving, start_run
from tests.db.telemetry.telemetry_made import (
    make_metric,
    make_precision_diff,
    make_steps,
    record,
)
from tests.site import free_port, halfstep
from tests.spool_made import artifact_of, checkpoint_of

BODY = bytes(range(256)) * 4096


@pytest.fixture
def saved(settings: Settings, database: Database, running: Run) -> Path:
    """A checkpoint at step 400 of the running run, at its path on the server."""
    path = settings.run_folder(running.id) / "checkpoints" / "step-00000400.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(BODY)
    sha256 = hashlib.sha256(BODY).hexdigest()
    file = {"kind": "checkpoint", "path": "", "size_bytes": len(BODY), "sha256": sha256}
    event: dict[str, Any] = {"step": 400, "reason": "end", "request": None, "files": [file]}
    with database.writing() as session:
        key = path.relative_to(settings.data).as_posix()
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(event), [key])
    return path


def test_submit_look_and_steer(client: Client) -> None:
    """The client can queue, list, show and cancel a run, as the pages can."""
    assert [recipe["name"] for recipe in client.recipes()] == ["digits"]
    run = client.submit("digits", {"training": {"steps": 7}}, name="mine", tags=["a", "b"])
    assert (run["status"], run["name"], run["tags"]) == ("queued", "mine", ["a", "b"])
    assert client.run(run["id"])["config"]["training"]["steps"] == 7
    assert [each["id"] for each in client.runs("mine")] == [run["id"]]
    assert list(client.runs("nobody's")) == []
    edited = client.edit(run["id"], tags=["c"], note="# Why")
    assert (edited["name"], edited["tags"], edited["note"]) == ("mine", ["c"], "# Why")
    client.pause(run["id"])
    assert client.run(run["id"])["status"] == "paused"
    assert client.resume(run["id"])["status"] == "queued"
    client.cancel(run["id"])
    assert client.wait(run["id"])["status"] == "cancelled"


def test_words_of_a_filter_may_begin_with_a_dash(client: Client, address: str, token: str) -> None:
    """Filter terms that begin with a dash can follow "--"."""
    client.submit("digits", {"training": {"steps": 7}}, name="mine")
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    for word, count in (("-status:failed", 1), ("-status:queued", 0)):
        typed = halfstep("run", "list", "--json", "--", word, "mine", **environment)
        assert (typed.returncode, typed.stdout.count('"id"')) == (0, count), typed.stderr


def test_a_list_says_why_it_is_empty(client: Client, address: str, token: str) -> None:
    """An empty list prints on stderr that no run matches, and which name no run has."""
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    [note] = client.run_page("nosuch>3")["notes"]
    typed = halfstep("run", "list", "nosuch>3", **environment)
    said = f"halfstep: {note}\nhalfstep: no run matches\n"
    assert (typed.returncode, typed.stdout, typed.stderr) == (0, "", said)
    typed = halfstep("run", "list", "nosuch>3", "--json", **environment)
    assert (typed.stdout, json.loads(typed.stderr)) == ("", {"notes": [note]})


def test_a_list_has_the_requested_length(
    client: Client, address: str, token: str, database: Database, ada: User
) -> None:
    """More runs than the 200 of one response can be listed, and no more than requested."""
    with database.writing() as session:
        for number in range(405):
            config = {"precision": "fp16", "training": {"steps": number % 7 + 1}}
            runs.submit(session, ada, Run(recipe="digits", config=config, name=f"n{number}"))
    for sort in ("-id", "training.steps"):
        found = client.run_page(sort=sort, limit=401)
        ids = [run["id"] for run in found["runs"]]
        assert (len(ids), len(set(ids)), found["total"]) == (401, 401, 405)
        assert ids[:200] == [run["id"] for run in client.runs(sort=sort, limit=200)]
    assert len({run["id"] for run in client.runs()}) == 405
    assert next(client.runs(values=["training.steps"]))["values"] == {"training.steps": 6}
    assert len(list(client.runs(limit=1000))) == 405
    with pytest.raises(ApiError, match="limit: 0 is not valid"):
        client.runs(limit=0)
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    listed = halfstep("run", "list", "--limit", "300", **environment)
    assert len(listed.stdout.splitlines()) == 1 + 300
    assert listed.stderr == "halfstep: 300 of 405 runs; --limit shows more\n"
    ended = halfstep("run", "list", "--limit", "0", **environment)
    assert (ended.returncode, "limit" in ended.stderr) == (1, True)


def test_a_run_is_paused_and_resumed_by_hand(client: Client, address: str, token: str) -> None:
    """Command and client pause and resume a run, or print why it is impossible."""
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    client.submit("digits", {})
    paused = json.loads(halfstep("run", "pause", "1", "--json", **environment).stdout)
    assert paused["status"] == "paused"
    assert "run 1  queued" in halfstep("run", "resume", "1", **environment).stdout
    ended = halfstep("run", "resume", "1", **environment)
    assert ended.returncode == 1
    assert ended.stderr.startswith("halfstep: ")


def test_numbers_that_json_lacks_are_named(client: Client, address: str, token: str) -> None:
    """NaN and infinity in a submission are rejected before it is sent, at any depth."""
    with pytest.raises(ApiError, match=r"^value: nan is not valid; allowed: a finite number$"):
        client.alert("loss_above", value=math.nan)
    with pytest.raises(ApiError, match=r"^config\.training\.sizes\.1: inf is not valid"):
        client.submit("digits", {"training": {"sizes": [1, math.inf]}})
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    typed = halfstep("run", "scale", "1", "nan", **environment)
    said = "halfstep: scale: nan is not valid; allowed: a finite number\n"
    assert (typed.returncode, typed.stderr) == (1, said)


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
def test_text_that_is_no_unicode_is_rejected_by_its_field(client: Client, text: str) -> None:
    """Text that is no Unicode, such as a file name with surrogates, is rejected by its field."""
    for call, field in (
        (lambda: client.edit(1, name=text), "name"),
        (lambda: client.edit(1, tags=["ok", text]), "tags.1"),
        (lambda: client.submit("digits", {text: 1}), "config"),
        (lambda: next(client.runs(filter=text)), ""),
    ):
        with pytest.raises(ApiError) as refused:
            call()
        assert list(refused.value.errors) == [field]
        assert ascii(text) in str(refused.value)
        assert "is not valid; allowed: text" in str(refused.value)


def test_a_rejected_token_is_named_with_its_source(address: str) -> None:
    """A rejected token is named by its variable or login file, and not shown."""
    typed = halfstep("run", "list", HALFSTEP_URL=address, HALFSTEP_TOKEN="hs_bad")
    assert typed.returncode == 1
    assert typed.stderr.startswith("halfstep: The token is unknown or has expired.")
    assert typed.stderr.endswith(" The token is that of HALFSTEP_TOKEN.\n")
    lost = halfstep("run", "list", HALFSTEP_URL=f"{address}/xyz", HALFSTEP_TOKEN="hs_bad")
    text = "is not an address of a Halfstep server: 404 Not Found"
    said = f"halfstep: {address}/xyz/api/v1/runs {text}\n"
    assert (lost.returncode, lost.stderr) == (1, said)
    place = credentials.store(Credentials(address, "hs_bad"))
    with Client() as client, pytest.raises(ApiError, match=f"The token is that of {place}"):
        next(client.runs())
    wrong = halfstep("run", "list", HALFSTEP_URL="nonsense", HALFSTEP_TOKEN="hs_bad")
    said = "halfstep: HALFSTEP_URL is 'nonsense'; allowed: http://… or https://…\n"
    assert (wrong.returncode, wrong.stderr) == (1, said)


def test_runs_are_laid_side_by_side(
    client: Client, database: Database, ada: User, address: str, token: str
) -> None:
    """The client compares runs: one call returns figures and differences, another the series."""
    run = start_run(database, ada)
    record(database, run, make_steps([3.0, 2.0]), events=[make_metric(2, 0.5)])
    client.submit("digits", {"training": {"steps": 7}})
    laid_out = client.compare([2, 1, 9])
    assert [each["run"]["id"] for each in laid_out["runs"]] == [2, 1]
    assert laid_out["runs"][1]["best"]["loss"]["value"] == 2.0
    assert laid_out["differences"]["training.steps"] == [7, 400]
    assert laid_out["missing"] == [9]
    charts = client.charts([1, 2], ["loss", "val/accuracy"], last=1)
    assert charts[1]["series"]["loss"]["y"] == [3.0]
    assert charts[2]["total"] == 0
    assert client.charts([1], ["val/accuracy"])[1]["metrics"]["val/accuracy"]["y"] == [0.5]
    with pytest.raises(ApiError, match="51 runs are given; allowed"):
        client.compare(range(1, 52))
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    typed = halfstep("run", "compare", "2", "1", "9", **environment)
    assert typed.returncode == 0, typed.stderr
    rows = {row[:-2].strip(): row for row in typed.stdout.splitlines()}
    cells = {" ".join(line.split()[:-2]): line.split()[-2:] for line in rows.values()}
    assert cells["best val/accuracy"] == ["–", "0.5"]
    assert cells["training.steps"] == ["7", "400"]
    assert "left out, because they do not exist: 9" in typed.stderr
    typed = halfstep("run", "compare", "2", "1", "--json", **environment)
    second, first = map(json.loads, typed.stdout.splitlines())
    assert (second["training.steps"], first["best val/accuracy"]) == (7, 0.5)


def test_parity_over_seeds_is_printed(
    client: Client, database: Database, ada: User, address: str, token: str
) -> None:
    """Client and command print a sentence for each parity group, or why there is none."""
    two_precisions(database, ada)
    (group,) = client.parity(range(1, 11), "val/accuracy", margin=0.02)["groups"]
    assert (group["name"], group["conclusion"]) == ("fp16", "equivalent")
    assert client.parity([1, 6], group="precision")["groups"][0]["conclusion"] == "unknown"
    with pytest.raises(ApiError, match="no run has 'val/lost'; allowed"):
        client.parity([1, 6], "val/lost")
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    ids = [str(run_id) for run_id in range(1, 11)]
    printed = halfstep("run", "parity", *ids, "--margin", "0.02", **environment)
    assert (printed.returncode, printed.stdout) == (0, f"{group['sentence']}\n")
    alone = halfstep("run", "parity", "1", "2", **environment)
    assert (alone.returncode, alone.stdout) == (0, "")
    assert "unknown: the runs differ in no setting but the seed" in alone.stderr
    timed = ("--value", "time_to_target", "--target", "0.95", "--json")
    typed = json.loads(halfstep("run", "parity", "1", "2", *timed, **environment).stdout)
    assert (typed["value"], typed["target"], typed["unpaired"]) == ("time_to_target", 0.95, [1, 2])
    assert typed == client.parity([1, 2], value="time_to_target", target=0.95)


def test_a_command_is_submitted_by_client_and_by_hand(
    client: Client, address: str, token: str
) -> None:
    """A command's values are parsed as JSON; an invalid one is named by its field."""
    rules = {"lr": {"type": "number", "maximum": 1}}
    given = {"folder": "/home/ada", "variables": {"A": "b"}, "schema": rules, "tags": ["t"]}
    run = client.submit_command("python train.py {lr} {name}", {"lr": 0.1, "name": "x"}, **given)
    assert (run["name"], run["source"], run["tags"]) == ("train", "command", ["t"])
    assert client.run(run["id"])["command"]["parameters"]["lr"]["maximum"] == 1
    with pytest.raises(ApiError, match=r"config\.lr: 2 is not valid"):
        client.submit_command("python train.py {lr}", {"lr": 2}, schema=rules)
    with pytest.raises(
        ApiError, match=r"config\.lr: the line has no placeholder {lr}; allowed: none"
    ):
        client.submit_command("python train.py", {"lr": 2})
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ["run", "submit", "--command", "python it.py {lr} {name}", "--param", "lr=1e-3"]
    words += ["--param", "name=a=b", "--env", "A=b=c", "--git", "https://host/it", "--json"]
    words += ["--commit", "abcdef0", "--devices", "2", "--folder", "src"]
    queued = json.loads(halfstep(*words, **environment).stdout)
    found = client.run(queued["id"])
    assert found["config"] == {"lr": 0.001, "name": "a=b"}
    assert (found["command"]["variables"], found["devices_per_node"]) == ({"A": "b=c"}, 2)
    for wrong in (["digits", "--command", "a"], [], ["--command", "a {b}", "--param", "b"]):
        refused = halfstep("run", "submit", *wrong, **environment)
        assert (refused.returncode, "use " in refused.stderr) == (2, True)


def test_a_command_is_swept_by_client_and_command(client: Client, address: str, token: str) -> None:
    """A command can be swept over some placeholders, with values for the others."""
    rules = {"lr": {"type": "number", "maximum": 1}}
    begun = client.sweep_command(
        *("python train.py {lr} {name}", {"lr": [0.1, 0.2]}, {"name": "x"}),
        **{"schema": rules, "folder": "/home/ada", "metric": "val/loss", "at_once": 2},
    )
    assert (begun["runs_total"], begun["open"], begun["metric"]) == (2, 2, "val/loss")
    assert begun["command"]["parameters"]["lr"]["maximum"] == 1
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ["sweep", "begin", "--command", "python it.py {lr} {opt} {name}", "--param", "name=a=b"]
    words += ["--search", "lr=loguniform(1e-4, 0.1)", "--search", "opt=adam, sgd", "--env", "A=b"]
    words += ["--kind", "random", "--runs", "3", "--folder", "/home/ada", "--json"]
    found = json.loads(halfstep(*words, **environment).stdout)
    assert (found["name"], found["runs_total"]) == ("it by lr, opt", 3)
    assert found["space"] == {"lr": "loguniform(0.0001, 0.1)", "opt": "adam, sgd"}
    assert found["config"]["name"] == "a=b"
    assert (found["command"]["variables"], found["command"]["folder"]) == ({"A": "b"}, "/home/ada")
    for wrong in (["digits"], ["--set", "lr=1"], ["--precision", "fp16"]):
        refused = halfstep("sweep", "begin", "--command", "a {b}", *wrong, **environment)
        assert (refused.returncode, "--command" in refused.stderr) == (2, True)
    assert halfstep("sweep", "begin", **environment).returncode == 2


def test_a_wrong_field_is_named(client: Client) -> None:
    """An invalid field's error has field, value and allowed values, in its message and as data."""
    with pytest.raises(ApiError, match=r"training\.batch_size: .*1,437") as refused:
        client.submit("digits", {"training": {"batch_size": 5000}})
    assert refused.value.status == 422
    assert list(refused.value.errors) == ["training.batch_size"]
    with pytest.raises(ApiError, match="There is no run 99") as missing:
        client.run(99)
    assert missing.value.status == 404


def test_a_download_is_the_file(client: Client, saved: Path, tmp_path: Path) -> None:
    """A downloaded file has the server's name, and its SHA-256 is checked."""
    path = client.download(1, tmp_path / "new")
    assert path == tmp_path / "new" / "digits-fp16-run1-step400.pt"
    assert path.read_bytes() == BODY
    with pytest.raises(ApiError, match="available: --kind checkpoint at step 400"):
        client.download(1, tmp_path, kind="weights")


def test_a_state_in_shards_is_not_downloaded_by_halves(
    client: Client, database: Database, saved: Path, tmp_path: Path
) -> None:
    """A sharded state is not downloaded in parts; the message names the available files."""
    with database.writing() as session:
        row = CheckpointFile(
            run_id=1, attempt=1, step=400, kind="shard.0", key="a", reason="interval"
        )
        row.size_bytes, row.sha256 = 1, "ab"
        session.add(row)
    with pytest.raises(ApiError, match="the state at step 400 is sharded"):
        client.download(1, tmp_path)


@pytest.mark.parametrize("had", [1, 5000, len(BODY)])
def test_a_download_that_broke_off_continues(
    client: Client, saved: Path, tmp_path: Path, had: int
) -> None:
    """A broken download continues from the received bytes, and the file is verified."""
    sha256 = hashlib.sha256(BODY).hexdigest()
    (tmp_path / f".{sha256}.partial").write_bytes(BODY[:had])
    saved.write_bytes(b"\0" * had + BODY[had:])  # of the same size: what is fetched again is wrong
    path = client.download(1, tmp_path)
    assert path.read_bytes() == BODY
    assert path.name == "digits-fp16-run1-step400.pt"


def test_of_the_files_of_a_run_the_only_one_is_downloaded(
    client: Client, database: Database, saved: Path, tmp_path: Path
) -> None:
    """A run's only file is downloaded; if there are several, the message lists the options for
    each.
    """
    with database.writing() as session:
        session.scalars(select(CheckpointFile)).one().kind = "weights.wb-pt"
    assert client.download(1, tmp_path).read_bytes() == BODY
    with pytest.raises(ApiError, match=r"of the kind weights; available: --kind weights\.wb-pt at"):
        client.download(1, tmp_path, kind="weights")


def test_a_damaged_download_is_not_kept(client: Client, saved: Path, tmp_path: Path) -> None:
    """A download whose digest is wrong, on the server or by an interruption, leaves no file."""
    part = tmp_path / f".{hashlib.sha256(BODY).hexdigest()}.partial"
    part.write_bytes(b"x" + BODY[1:100])
    with pytest.raises(ApiError, match=r"digits-fp16-run1-step400\.pt is damaged"):
        client.download(1, tmp_path)
    assert not part.exists()
    saved.write_bytes(b"x" + BODY[1:])
    with pytest.raises(ApiError, match=r"step-00000400\.pt is damaged: its SHA-256 differs"):
        client.download(1, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_login_tries_the_token_once(address: str, token: str) -> None:
    """`login` tests the token: an unknown one, or one of another kind of server, is not stored;
    without an answer another login is replaced only with --force.
    """
    command = [sys.executable, "-m", "halfstep.cli.main", "login"]

    def login(url: str, typed: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, url, *more], input=typed, capture_output=True, text=True, check=False
        )

    for url, typed, result in (
        (address, "hs_wrong", "The token is unknown or has expired"),
        (f"{address}/none", token, "is not an address of a Halfstep server"),
    ):
        ended = login(url, typed)
        assert result in ended.stderr
        assert (ended.returncode, ended.stdout) == (1, "")
        assert credentials.read() is None
    ended = login(address, token)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert credentials.find() == (address, token, str(credentials.place()))
    away = f"http://127.0.0.1:{free_port()}"
    ended = login(away, "hs_other")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "--force" in ended.stderr
    assert credentials.find() == (address, token, str(credentials.place()))
    assert login(away, "hs_other", "--force").returncode == 0
    assert credentials.find() == (away, "hs_other", str(credentials.place()))


def test_without_a_token_the_error_says_where_to_create_one(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a token the error says where to create one; a wrong token is rejected."""
    monkeypatch.delenv("HALFSTEP_TOKEN", raising=False)
    with pytest.raises(ApiError, match=f"create one at {address}/account"):
        Client(address)
    with Client(address, "wrong") as client, pytest.raises(ApiError) as refused:
        next(client.runs())
    assert refused.value.status == 401


def test_a_server_that_is_away_is_a_sentence() -> None:
    """An unreachable server is reported in one sentence without a traceback or a password."""
    address = f"127.0.0.1:{free_port()}"
    client = Client(f"http://ada:secret@{address}", "token")
    result = rf"the server does not answer at http://{address}: .*refused"
    with pytest.raises(ApiError, match=result):
        next(client.runs())


def test_waiting_clients_continue_after_a_restart_of_the_server(
    settings: Settings, database: Database, running: Run, token: str
) -> None:
    """A waiting client reports an outage once and continues; a missing run is not retried."""
    said: list[str] = []
    with serving(settings, database) as (_server, address), Client(address, token) as client:
        followed = client.follow(running.id, on_outage=said.append)
        assert next(followed)["status"] == "running"
        with pytest.raises(ApiError, match="no run 99"):
            client.wait(99, on_outage=said.append)
    with Client(address, token) as client, ExitStack() as stack:
        with pytest.raises(ApiError, match="does not answer"):
            client.wait(running.id, patience=0, on_outage=said.append)
        assert said == []

        def restart(text: str) -> None:
            said.append(text)
            stack.enter_context(serving(settings, database, int(address.rpartition(":")[2])))
            with database.writing() as session:
                attempt = running.attempt
                queue.end(session, running.id, attempt, Status.FAILED, error="no", reason="no")

        found = client.follow(running.id, on_outage=restart)
        assert [run["status"] for run in found] == ["failed"]
    [text] = said
    assert "retrying for 5 min 0 s" in text


def test_a_run_that_diverged_is_called_so(
    address: str, token: str, database: Database, running: Run
) -> None:
    """A diverged run is called so in output, JSON and exit code, although it has finished."""
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.step, run.loss, run.last_flags = 9, None, NONFINITE_LOSS
        queue.end(session, running.id, running.attempt, Status.FINISHED)
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    result = halfstep("run", "follow", "1", **environment)
    assert result.stdout.split()[:3] == ["run", "1", "diverged"]
    assert result.returncode == 5
    assert "  diverged  " in halfstep("run", "list", "status:diverged", **environment).stdout
    found = json.loads(halfstep("run", "list", "--json", **environment).stdout)
    assert (found["status"], found["outcome"]) == ("finished", "diverged")


def test_commands_do_what_the_client_does(
    address: str,
    token: str,
    offered: None,
    database: Database,
    ada: User,
) -> None:
    """Commands submit with settings, list, show and cancel; a mistake ends in one sentence."""
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ("digits", "--set", "training.steps=9", "--precision", "bf16", "--name", "typed")
    assert "queued  typed  step 0/9" in halfstep("submit", *words, **environment).stdout
    assert "typed" in halfstep("runs", "typed", **environment).stdout
    assert "bf16" in halfstep("run", "show", "1", **environment).stdout
    assert '"precision": "bf16"' in halfstep("run", "show", "1", "--json", **environment).stdout
    assert "cancelled" in halfstep("cancel", "1", **environment).stdout
    wrong = halfstep("submit", "digits", "--set", "training.steps=0", **environment)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("halfstep: training.steps: ")
    assert "Traceback" not in wrong.stderr
    for text in ("off", "", "null"):
        words = ("digits", "--set", f"training.max_grad_norm={text}", "--json")
        queued = json.loads(halfstep("submit", *words, **environment).stdout)
        shown = json.loads(
            halfstep("run", "show", str(queued["id"]), "--json", **environment).stdout
        )
        assert shown["config"]["training"]["max_grad_norm"] is None
    unset = halfstep("submit", "digits", "--set", "training.steps", **environment)
    assert "use FIELD=VALUE" in unset.stderr


def test_a_run_of_a_recipe_is_reproduced_by_its_settings(
    client: Client, address: str, token: str, offered: None, database: Database
) -> None:
    """The printed command, and --queue, repeat a recipe's run with the same configuration."""
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    first = client.submit("digits", {"training": {"steps": 9, "max_grad_norm": None}}, tags=["a"])
    content = dict.fromkeys(("worker", "platform", "folder", "file", "git"))
    content |= {"host": "h", "devices": [], "versions": {}, "command": ["trainer.process"]}
    with database.writing() as session:
        environments.record(session, first["id"], 1, content, environments.Texts())
    *_notes, command = halfstep("run", "reproduce", "1", **environment).stdout.splitlines()
    halfstep(*shlex.split(command)[1:], **environment)
    assert "run 1 again" in halfstep("run", "reproduce", "1", "--queue", **environment).stdout
    configs = [client.run(number)["config"] for number in (1, 2, 3)]
    assert configs[0] == configs[1] == configs[2]
    assert client.run(3)["tags"] == ["a"]


def test_a_script_waits_for_the_end_and_gets_failures(
    address: str,
    token: str,
    database: Database,
    running: Run,
    saved: Path,
    tmp_path: Path,
) -> None:
    """`wait` returns a run with any outcome; commands can download its files."""
    with database.writing() as session:
        error = "Traceback:\n  line 1\nValueError: bye\n"
        queue.end(
            session,
            running.id,
            running.attempt,
            Status.FAILED,
            error=error,
            reason="exit code 3: bye",
        )
    with Client(address, token) as client:
        assert client.wait(running.id)["status"] == "failed"
        assert [run["status"] for run in client.follow(running.id)] == ["failed"]
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    result = halfstep("run", "follow", "1", **environment)
    assert result.stdout.endswith("  (exit code 3: bye)\n")
    assert result.returncode == 3
    assert "  ValueError: bye\n" in halfstep("run", "list", **environment).stdout
    followed = halfstep("run", "follow", "1", "--json", **environment)
    assert (json.loads(followed.stdout)["status"], followed.returncode) == ("failed", 3)
    result = halfstep("download", "1", str(tmp_path / "got"), **environment)
    assert result.stdout.strip() == os.fspath(tmp_path / "got" / "digits-fp16-run1-step400.pt")


def test_the_commands_of_runs_stand_together_too(
    client: Client, address: str, token: str, database: Database
) -> None:
    """`halfstep run COMMAND` has all run commands with `--json`; the log is printed to its end."""
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    queued = json.loads(halfstep("run", "submit", "digits", "--json", **environment).stdout)
    with database.writing() as session:
        session.add_all(
            LogLine(
                run_id=queued["id"],
                number=number,
                attempt=1,
                time=0.0,
                stream="stdout",
                text=f"line {number}",
            )
            for number in range(1, 1002)
        )
    assert [line["number"] for line in client.log(queued["id"])] == list(range(1, 1002))
    lines = halfstep("run", "log", "1", **environment).stdout.splitlines()
    assert (lines[0], len(lines)) == ("line 1", 1001)
    [listed] = halfstep("run", "list", "--json", **environment).stdout.splitlines()
    assert json.loads(listed)["id"] == queued["id"]
    ended = json.loads(halfstep("run", "cancel", "1", "--json", **environment).stdout)
    assert ended["status"] == "cancelled"
    assert halfstep("run", "follow", "1", **environment).returncode == 4
    assert "follow" in halfstep("run", "--help", **environment).stdout
    assert "3 if it failed" in halfstep("run", "follow", "--help", **environment).stdout


@pytest.mark.parametrize("typed", ["download 1", "export tensorboard 1", "export mlflow 1"])
def test_a_folder_that_cannot_be_written_is_named(
    typed: str, address: str, token: str, saved: Path, tmp_path: Path
) -> None:
    """For an unwritable folder one line with the reason is printed; a file is a usage error."""
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    ended = halfstep(*typed.split(), "/proc/nope", **environment)
    assert ended.stderr == "halfstep: /proc/nope: No such file or directory\n"
    assert ended.returncode == 1
    ended = halfstep(*typed.split(), "x" * 300, "--json", **environment)
    assert json.loads(ended.stderr) == {"error": f"{'x' * 300}: File name too long"}
    assert ended.returncode == 1
    file = tmp_path / "file"
    file.touch()
    ended = halfstep(*typed.split(), str(file), **environment)
    assert f"{file} is a file; allowed: a folder" in ended.stderr
    assert ended.returncode == 2


def test_bytes_that_are_no_text_are_rejected(
    client: Client,
    address: str,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bytes that are no UTF-8 in an option are rejected by its name; a path may have them."""
    monkeypatch.setenv("HALFSTEP_URL", address)
    monkeypatch.setenv("HALFSTEP_TOKEN", token)
    client.submit("digits", {})
    no_text = os.fsdecode(b"\xff\xfe")
    for option, *words in (
        ("--name", "submit", "digits", "--name"),
        ("--set", "submit", "digits", "--set"),
        ("--name", "run", "edit", "1", "--name"),
        ("--tag", "run", "edit", "1", "--tag"),
        ("--note", "run", "edit", "1", "--note"),
        ("--note", "note", "write", "1", "--note"),
        ("FILTER", "run", "list"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main.main([*words, no_text])
        result = rf"halfstep: {option}: b'\xff\xfe' is not valid; allowed: UTF-8"
        assert capsys.readouterr().err.startswith(result)
    with pytest.raises(SystemExit, match="no file of the kind"):
        main.main(["download", "1", no_text])
    weights = tmp_path / f"{no_text}.pt"
    weights.write_bytes(b"none")
    with pytest.raises(SystemExit, match=r"halfstep: .*"):
        main.main(["submit", "digits", "--weights", str(weights)])


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_stdin_that_is_no_text_is_rejected(locale: str) -> None:
    """A note and a token on stdin that are no UTF-8 are rejected."""
    for words in (("run", "edit", "1", "--note", "-"), ("login", "http://127.0.0.1:9")):
        ended = subprocess.run(
            [sys.executable, "-m", "halfstep.cli.main", *words],
            input=b"\xff\xfe\n",
            env={**os.environ, "LC_ALL": locale},
            capture_output=True,
            check=False,
        )
        assert b"stdin is not valid UTF-8" in ended.stderr
        assert ended.returncode == 2


def test_a_full_disk_below_stdout_is_named(
    address: str, token: str, database: Database, running: Run
) -> None:
    """For a full disk under stdout one line with the reason is printed, for any output."""
    with database.writing() as session:
        line = {"run_id": running.id, "attempt": 1, "time": 0.0, "stream": "stdout"}
        session.add_all(LogLine(number=n, text="x" * 99, **line) for n in range(1, 202))
    environment = {**os.environ, "HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    for words in (("log", "1"), ("show", "1"), ("list", "--json")):
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "halfstep.cli.main", "run", *words],
                env=environment,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        result = ended.stderr if "--json" not in words else json.loads(ended.stderr)["error"] + "\n"
        assert result.removeprefix("halfstep: ") == "output: No space left on device\n"
        assert ended.returncode == 1


def test_runs_are_deleted_and_restored(client: Client, address: str, token: str) -> None:
    """Client and command delete and restore runs; an active one is rejected by name."""
    first, second = (client.submit("digits", {})["id"] for _ in range(2))
    client.cancel(first)
    answer = client.delete(first, second)
    assert answer["done"] == [first]
    assert [each["id"] for each in answer["refused"]] == [second]
    assert [run["id"] for run in client.trash()] == [first]
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    restored = halfstep("run", "restore", str(first), **known)
    assert (restored.returncode, restored.stdout) == (0, f"run {first} is restored\n")
    assert client.make_project("vision")["name"] == "vision"
    assert "gone is created" in halfstep("projects", "create", "gone", **known).stdout
    assert client.move(first, 99, project="vision")["done"] == [first]
    moved = halfstep("run", "move", str(first), "99", "--project", "vision", **known)
    assert (moved.returncode, moved.stdout) == (1, f"run {first} is moved\n")
    assert (
        "vision is now sight" in halfstep("projects", "rename", "vision", "sight", **known).stdout
    )
    assert halfstep("projects", "delete", "gone", **known).returncode == 0
    assert "only an empty one" in halfstep("projects", "delete", "sight", **known).stderr
    assert [each["name"] for each in client.projects()] == ["", "sight"]
    assert client.run(first)["project"] == "sight"
    refused = halfstep("run", "delete", str(second), **known)
    assert (refused.returncode, "Cancel it first" in refused.stderr) == (1, True)
    assert refused.stderr.startswith("halfstep: ")
    words = ("run", "edit", str(first), "--name", "baseline", "--no-tags", "--note", "why")
    assert halfstep(*words, **known).returncode == 0
    run = client.run(first)
    assert (run["name"], run["tags"], run["note"]) == ("baseline", [], "why")
    assert halfstep("run", "edit", str(first), **known).returncode == 2


def test_documented_requests_of_a_shell_log_a_run(
    address: str, token: str, client: Client, running: Run
) -> None:
    """The documented curl requests log a run, also on a server with other runs."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "client.md").read_text()
    script = text.partition("## Other languages")[2].partition("```sh\n")[2].partition("```")[0]
    script = script.replace("http://127.0.0.1:8000", address).replace("hs_…", token)
    subprocess.run(["bash", "-ec", script], check=True, capture_output=True)
    run = next(client.runs())
    assert run["id"] != running.id
    assert (run["name"], run["status"], run["step"]) == ("from a shell", "finished", 1)


def test_sweeps_by_the_client_and_the_command(
    client: Client, address: str, token: str, database: Database
) -> None:
    """Client and command begin, list, extend, pause, resume and cancel sweeps, and show each
    trial's values.
    """
    space = {"training.batch_size": [16, 32]}
    begun = client.begin_sweep("digits", space, {"training": {"steps": 5}}, goal="minimise")
    assert (begun["status"], begun["runs_total"], begun["open"]) == ("running", 2, 1)
    assert begun["goal"] == "minimize"
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}

    def run_command(*words: str) -> str:
        return halfstep("sweep", *words, **environment).stdout

    words = ("digits", "--search", "training.max_grad_norm=uniform(0.5, 2)", "--kind", "random")
    more = ("--goal", "minimize", "--runs", "3", "--at-once", "2", "--set", "training.steps=7")
    found = json.loads(run_command("begin", *words, *more, "--json"))
    assert (found["id"], found["open"], found["config"]["training"]["steps"]) == (2, 2, 7)
    listed = run_command("list").splitlines()[1]
    assert listed.split()[:6] == ["2", "digits", "by", "max_grad_norm", "running", "0"]
    columns, *trials = run_command("show", "1").splitlines()[-2:]
    assert "training.batch_size" in columns
    assert trials[0].split()[1:4] == ["queued", "–", "16"]
    assert client.pause_sweep(1)["status"] == "paused"
    assert client.resume_sweep(1)["status"] == "running"
    assert "/ 3 runs" in run_command("extend", "1", "--search", "training.batch_size=[64]")
    assert client.extend_sweep(2, runs=1)["runs_total"] == 4
    assert client.rank_sweep(2, "val/acc")["goal"] == "maximize"
    assert json.loads(run_command("rank", "2", "loss", "--json"))["goal"] == "minimize"
    with database.writing() as session:
        projects.make(session, "vision")
    assert client.move_sweep(2, project="vision")["project"] == "vision"
    assert json.loads(run_command("move", "2", "--project", "", "--json"))["project"] == ""
    assert "cancelled" in run_command("cancel", "2")
    assert client.wait_for_sweep(2)["status"] == "cancelled"
    assert [each["status"] for each in client.trials(2)] == ["cancelled"] * 2
    assert [each["id"] for each in client.sweeps()] == [2, 1]
    assert client.sweep(1)["best"] is None
    wrong = halfstep("sweep", "begin", "digits", "--search", "training.steps=0, 1", **environment)
    assert wrong.returncode == 1
    assert "0 is not valid; allowed" in wrong.stderr


def test_alerts_are_made_and_deliver_from_a_script(client: Client, settings: Settings) -> None:
    """An alert rule is created with its channel and tested; a local channel is refused."""
    settings.data.mkdir()
    with pytest.raises(ApiError, match="within the server's own network"):
        client.add_channel("webhook", "http://127.0.0.1:9/hook", name="mine")
    channel = client.add_channel("webhook", "http://hook.invalid/hook", name="mine")
    assert channel["secret"]
    assert [each["name"] for each in client.channels()] == ["mine"]
    rule = client.alert("scale_below", value=1.0, all_runs=True)
    assert rule["channel_ids"] == [channel["id"]]
    assert client.alert_rules() == [rule]
    client.test_channel(channel["id"])
    [delivery] = client.deliveries()
    assert (delivery["channel_id"], delivery["is_delivered"]) == (channel["id"], False)
    assert list(client.alerts()) == []
    client.delete_alert(rule["id"])
    client.delete_channel(channel["id"])
    assert (client.alert_rules(), client.channels()) == ([], [])
    with pytest.raises(ApiError, match="You have no rule 1"):
        client.delete_alert(rule["id"])


def test_alerts_are_typed(
    client: Client,
    settings: Settings,
    address: str,
    token: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands add, list, test and remove alerts; --json prints the API's response."""
    settings.data.mkdir()
    monkeypatch.setenv("HALFSTEP_URL", address)
    monkeypatch.setenv("HALFSTEP_TOKEN", token)
    channel = client.add_channel("webhook", "http://hook.invalid/hook", name="mine")

    def run_command(*words: str) -> str:
        main.main(["alert", *words])
        return capsys.readouterr().out

    made = json.loads(run_command("add", "scale_below", "--value", "1", "--all", "--json"))
    assert client.alert_rules() == [made]
    listed = run_command("list")
    assert made["text"] in listed
    assert listed.splitlines()[-1].split() == ["1", "webhook", "mine", "hook.invalid", "on"]
    assert "sending a test" in run_command("test", str(channel["id"]))
    assert next(iter(client.deliveries()))["channel_id"] == channel["id"]
    assert "removed rule 1" in run_command("remove", "1")
    assert client.alert_rules() == []
    with pytest.raises(SystemExit, match="condition"):
        run_command("add", "nothing")
    with pytest.raises(SystemExit):
        run_command("add", "ended", "--run", "1", "--all")


def test_views_are_saved_from_a_script(client: Client) -> None:
    """Client and command save, replace, list and delete views."""
    view = client.save_view("mine", "status:failed", sort="-loss", columns=["loss", "lr"])
    assert client.views() == [view]
    assert (view["filter"], view["columns"], view["group"]) == ("status:failed", "loss,lr", "")
    assert client.save_view("mine", group="lr")["id"] == view["id"]
    client.delete_view(view["id"])
    assert client.views() == []
    with pytest.raises(ApiError, match="allowed"):
        client.save_view("other", "nonsense:::")


def test_presets_are_saved_and_submitted_from_a_script(
    client: Client, address: str, token: str, database: Database
) -> None:
    """Client and command use presets; two of one name are distinguished by project."""
    settings = {"training": {"steps": 7}}
    kept = client.save_preset("quick", "digits", settings, tags=["a", "b"], priority=3)
    assert (kept["config"], kept["tags"], kept["priority"]) == (settings, ["a", "b"], 3)
    run = client.submit_preset("quick", {"training": {"batch_size": 32}}, name="mine")
    assert (run["name"], run["tags"], run["priority"]) == ("mine", ["a", "b"], 3)
    config = client.run(run["id"])["config"]["training"]
    assert (config["steps"], config["batch_size"]) == (7, 32)
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ("run", "submit", "--preset", "quick", "--set", "training.steps=9", "--tag", "c")
    typed = json.loads(halfstep(*words, "--json", **known).stdout)
    assert (typed["tags"], typed["steps_total"], typed["priority"]) == (["c"], 9, 3)
    with database.writing() as session:
        projects.make(session, "vision")
    saving = ("preset", "save", "quick", "digits", "--project", "vision", "--precision", "bf16")
    assert halfstep(*saving, **known).stdout == "preset 2: quick, digits in vision\n"
    with pytest.raises(ApiError, match="it exists in '', 'vision'"):
        client.submit_preset("quick")
    assert client.submit_preset("quick", project="vision")["precision"] == "bf16"
    with pytest.raises(ApiError, match="preset is 'slow'; there is none"):
        client.submit_preset("slow")
    with pytest.raises(ApiError, match="0 is not valid"):
        client.save_preset("wrong", "digits", {"training": {"steps": 0}})
    with pytest.raises(ApiError, match="name: "):
        client.save_preset(" ", "digits")
    listed = halfstep("preset", "list", **known).stdout.splitlines()
    assert [line.split() for line in listed[1:]] == [
        ["1", "quick", "digits"],
        ["2", "quick", "digits", "vision"],
    ]
    assert halfstep("preset", "remove", "1", **known).stdout == "removed preset 1\n"
    assert [each["id"] for each in client.presets()] == [2]
    both = halfstep("run", "submit", "digits", "--preset", "quick", **known)
    assert (both.returncode, "exactly one of a recipe, --preset" in both.stderr) == (2, True)


def test_notes_are_written_from_a_script(client: Client, address: str, token: str) -> None:
    """Notes of comparisons and projects can be written, and conflicting edits are kept."""
    runs = [client.submit("digits")["id"] for _ in range(2)]
    assert client.note(*runs) == ""
    assert client.write_note("# Why", *runs) == "# Why"
    assert client.note(*reversed(runs)) == "# Why"
    with pytest.raises(ApiError, match="changed in the meantime"):
        client.write_note("mine", *runs, seen="")
    assert client.write_note("mine", *runs, seen="# Why") == "mine"
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ("note", "write", "--project", "", "--note", "Our **plan**")
    assert halfstep(*words, **known).stdout == "saved the note\n"
    assert halfstep("note", "show", "--project", "", **known).stdout == "Our **plan**\n"
    shown = halfstep("note", "show", "2", "1", "--json", **known).stdout
    assert json.loads(shown) == {"note": "mine"}
    assert "removed the note" in halfstep("note", "write", "1", "2", "--note", "", **known).stdout
    assert halfstep("note", "show", **known).returncode == 2
    with pytest.raises(ApiError, match="no run 99"):
        client.note(99)
    with pytest.raises(ApiError, match="20,001 characters"):
        client.write_note("x" * 20_001, project="")


def test_reports_are_written_from_a_script(client: Client, address: str, token: str) -> None:
    """Reports can be written by a script; a panel that cannot be drawn is refused by field."""
    run_id = client.submit("digits")["id"]
    text = f"```panel\nruns: {run_id}\nmetrics: loss\n```"
    assert client.create_report("Precisions", text)["runs"] == [run_id]
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ("report", "create", "Second", "--text", "Our **plan**")
    assert halfstep(*words, **known).stdout == "created report 2\n"
    assert halfstep("report", "show", "2", **known).stdout == "# Second\n\nOur **plan**\n"
    listed = halfstep("report", "list", "--project", "", **known).stdout.splitlines()
    assert [line.split() for line in listed[1:]] == [
        ["2", "Second", "ada"],
        ["1", "Precisions", "ada"],
    ]
    shown = json.loads(halfstep("report", "show", "1", "--json", **known).stdout)
    assert shown["text"] == client.report(1)["text"] == text
    with pytest.raises(ApiError, match="runs: 'x' is not valid"):
        client.create_report("Wrong", text.replace(f"runs: {run_id}", "runs: x"))
    assert [report["id"] for report in client.reports()] == [2, 1]


def test_rules_of_retention_from_a_script(
    client: Client, address: str, token: str, database: Database, running: Run, saved: Path
) -> None:
    """Retention rules are previewed, set with confirmation, listed and ended."""
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.FINISHED)
        session.get_one(Run, running.id).ended_at = 1.0
        session.add(
            LogLine(run_id=running.id, number=1, attempt=1, time=0.0, stream="stdout", text="x")
        )
    found = client.preview_retention(project="", log_days=30)
    result = {"run_id": 1, "steps": 0, "stored_bytes": 0, "log_lines": 1, "samples": 0}
    assert (found["runs"], found["not_looked_at"]) == (1, 0)
    assert found["largest"] == [result | {"name": client.run(1)["name"]}]
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    words = ("--project", "", "--logs", "30")
    assert "1 runs, 0 B of files" in halfstep("retention", "preview", *words, **known).stdout
    asked = halfstep("retention", "add", *words, **known)
    assert (asked.returncode, "add --yes" in asked.stderr) == (2, True)
    assert client.retention() == []
    added = halfstep("retention", "add", *words, "--yes", **known).stdout
    assert added == "Default project: logs and samples after 30 days\n"
    made = client.set_retention(checkpoint_days=90)
    assert (made["scope"], made["checkpoint_days"], made["log_days"]) == ("all", 90, None)
    assert [each["scope"] for each in client.retention()] == ["all", "in:"]
    assert halfstep("retention", "remove", "--all", **known).returncode == 0
    client.end_retention(project="")
    assert client.retention() == []
    with pytest.raises(ApiError, match=r"Checkpoints: 0\.5 is not valid"):
        client.set_retention(checkpoint_days=0.5)
    with pytest.raises(ApiError, match="Both fields are empty"):
        client.set_retention()


def test_the_document_has_every_method_of_the_client() -> None:
    """Every public method of the client, and each command, is in docs/reference/client.md."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "client.md").read_text()
    words = set(re.findall(r"\w+", text))
    methods = {name for name in dir(Client) if not name.startswith("_")}
    assert methods - words - {"close"} == set()
    shortcuts = {name for name, (_module, shortcut) in main.CLIENT.items() if shortcut}
    names = sorted({*main.CLIENT} - shortcuts)
    assert [name for name in names if f"halfstep {name}" not in text] == []
    for group in names:
        commands = getattr(main.command(group), "commands", ())
        lines = [line for line in text.splitlines() if f"halfstep {group} " in line]
        assert [name for name in commands if not re.search(rf"\b{name}\b", "".join(lines))] == []


def test_a_log_of_100_mb_is_printed_whole_from_its_files(
    settings: Settings, address: str, token: str, database: Database, running: Run
) -> None:
    """A log of 100 MB is printed from its parts in order; a run without files has the page's
    lines.
    """
    lines = [f"line {number} {'x' * 90}\n".encode() for number in range(1_000_000)]
    whole = b"".join(lines)
    with database.writing() as session:
        for number, half in enumerate((lines[:500_000], lines[500_000:]), 1):
            name = f"log/attempt-0001-{number:06}.txt.gz"
            path = settings.run_folder(running.id) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(b"".join(half), 1))
            size, key = path.stat().st_size, path.relative_to(settings.data).as_posix()
            event = {"step": 0, "name": name, "size_bytes": size, "sha256": ""}
            artifacts.publish(session, running.id, 1, artifact_of(event), key)
        queue.end(session, running.id, 1, Status.FINISHED)
    command = [sys.executable, "-m", "halfstep.cli.main", "run", "log", str(running.id)]
    environment = os.environ | {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert hashlib.sha256(printed).digest() == hashlib.sha256(whole).digest()
    with Client(address, token) as client:
        assert client.artifacts(running.id) == []


def test_precision_diff_is_read_and_requested(
    client: Client, address: str, token: str, database: Database, running: Run
) -> None:
    """A precision diff is printed as a table or JSON, and can be requested from a running run."""
    known = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    command = ("run", "precision-diff", str(running.id))
    assert client.precision_diff(running.id) is None
    without = halfstep(*command, **known)
    assert (without.returncode, without.stdout) == (1, "")
    assert "has no precision diff" in without.stderr
    record(database, running, events=[make_precision_diff(3)])
    diff = client.precision_diff(running.id)
    assert diff is not None
    assert (diff["error"], diff["suggestions"][0]["name"]) == ("Infinity", "head")
    table = halfstep(*command, **known).stdout
    assert "Suggested for fp32: head: local error of its results not finite" in table
    assert "∞" in table
    assert json.loads(halfstep(*command, "--json", **known).stdout)["step"] == 3
    wrong = make_precision_diff(4, suggested=[], suggested_error=None, error=1.17)
    record(database, running, events=[wrong])
    assert "The gradient has an error of 1.17" in halfstep(*command, **known).stdout
    assert halfstep(*command, "--request", **known).stdout == (
        f"run {running.id}: requested a precision diff of the next step\n"
    )
    assert client.request_precision_diff(running.id)["id"] == 2
