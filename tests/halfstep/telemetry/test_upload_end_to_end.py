"""A script with two added lines is on the page, by watch, uploader, server and database."""

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import select

from db.access import accounts
from db.database import Database
from db.tables import Run, ScalerEvent, Status, User
from db.telemetry import step_rows
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.run_folder import last_step
from tests import warm
from tests.site import SECONDS, halfstep, until

SCRIPT = """
import sys, time, torch
from torch import nn
import halfstep

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
every = {"histogram_every": 10, "layers_every": 10, "headroom_every": 10}
watch = halfstep.watch(net, name="mine", config={"lr": 1e-3}, tags=["tried"], **every)
for step in range(1, int(sys.argv[1]) + 1):
    loss = net(torch.randn(4, 8)).square().mean() * (1e38 if step == 5 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if len(sys.argv) > 2:
        time.sleep(0.02)
watch.log({"sizes": halfstep.Histogram(net[0].weight), "tone": halfstep.Audio([0.0, 1.0], 8000)})
torch.save(net.state_dict(), "last.pt")
watch.checkpoint("last.pt", upload=True)
"""

PRINTING = """
import os, sys
import halfstep

watch = halfstep.watch(name="mine")
print(os.environ["HALFSTEP_TOKEN"], "is a secret")
print("before the end", flush=True)
sys.stdin.readline()
raise ValueError("wrong")
"""


@pytest.fixture
def reader(address: str, database: Database, ada: User) -> Iterator[httpx2.Client]:
    """Ada's browser."""
    with database.writing() as session:
        token = accounts.make_link_token(session, ada)
    with httpx2.Client(base_url=address, follow_redirects=True, timeout=SECONDS) as client:
        client.post("/", data={"token": token}, headers={"origin": address})
        yield client


def train(folder: Path, server: dict[str, str], *words: str) -> "subprocess.Popen[str]":
    (folder / "train.py").write_text(SCRIPT)
    return warm.Popen(
        [sys.executable, "train.py", *words],
        cwd=folder,
        env={**os.environ, **server},
        stderr=subprocess.PIPE,
        text=True,
    )


def the_run(database: Database) -> Run | None:
    with database.reading() as session:
        return session.scalar(select(Run))


def test_a_watched_run_is_on_the_page(
    tmp_path: Path, database: Database, server: dict[str, str], reader: httpx2.Client
) -> None:
    """The page has every step, the skip and its culprits, the checkpoint's bytes and the end."""
    _out, said = train(tmp_path, server, "40").communicate(timeout=SECONDS)
    until(lambda: (run := the_run(database)) is not None and run.status == Status.FINISHED)
    run = the_run(database)
    assert run is not None
    assert (run.name, run.source, run.step, run.skipped) == ("mine", "watch", 40, 1)
    with database.reading() as session:
        rows = step_rows.read_rows(session, run.id, most=100)
        assert [row.step for row in rows] == list(range(1, 41))
        [skip] = session.scalars(select(ScalerEvent).where(ScalerEvent.kind == "skip"))
        assert (skip.step, skip.scale_after) == (5, 2.0**19)
        assert {each["name"] for each in skip.culprits} >= {"0.weight", "2.weight"}
    assert "watching" in said
    page = reader.get(f"/runs/{run.id}")
    assert page.status_code == 200
    assert "mine" in page.text
    assert "finished" in page.text
    for section in ("exponents", "layers", "headroom"):
        assert f'<section id="{section}"' in page.text
    for shown in ("tone.wav", "sizes.histogram.json"):
        assert shown in page.text
    [file] = reader.get(f"/api/v1/runs/{run.id}/checkpoints").json()["checkpoints"]
    saved = reader.get(f"/runs/{run.id}/checkpoints/{file['id']}/download").content
    assert saved == (tmp_path / "last.pt").read_bytes()


def test_a_killed_script_loses_nothing_that_it_spooled(
    tmp_path: Path, database: Database, server: dict[str, str]
) -> None:
    """After kill -9 every spooled step arrives, and so does the report that the process is gone."""
    training = train(tmp_path, server, "100000", "slowly")
    until(lambda: (run := the_run(database)) is not None and run.step >= 20)
    training.send_signal(signal.SIGKILL)
    training.communicate()

    def count_spooled() -> int:
        return last_step(AttemptFiles(tmp_path / "halfstep-runs" / "mine", 2))

    until(lambda: (run := the_run(database)) is not None and run.status == Status.FAILED)
    run = the_run(database)
    assert run is not None
    assert run.step == count_spooled()
    with database.reading() as session:
        rows = step_rows.read_rows(session, run.id, most=run.step + 1)
        assert [row.step for row in rows] == list(range(1, run.step + 1))


def test_the_output_of_a_watched_script_is_on_its_page(
    tmp_path: Path, database: Database, server: dict[str, str], reader: httpx2.Client
) -> None:
    """A watched script's output and system samples are on its page, and its log to download."""
    (tmp_path / "train.py").write_text(PRINTING)
    environment = {**os.environ, **server, "HALFSTEP_CONSOLE": "yes", "HALFSTEP_SYSTEM": "yes"}
    with warm.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as script:
        until(lambda: the_run(database) is not None)
        run = the_run(database)
        assert run is not None
        address = f"/api/v1/runs/{run.id}"

        def lines() -> list[dict[str, object]]:
            return list(reader.get(f"{address}/log").json()["log"])

        until(lambda: any(line["text"] == "before the end" for line in lines()))
        until(lambda: bool(reader.get(f"{address}/system").json()["devices"]))
        script.communicate(b"\n", timeout=SECONDS)
    until(lambda: (run := the_run(database)) is not None and run.status == Status.FAILED)
    printed = lines()
    assert {"text": "ValueError: wrong", "stream": "stderr"}.items() <= printed[-1].items()
    assert ("*** is a secret", "stdout") in [(line["text"], line["stream"]) for line in printed]
    [host] = reader.get(f"{address}/system").json()["devices"]
    assert host["device"] == -1
    assert host["memory_bytes"][0] > 0
    page = reader.get(f"/runs/{run.id}")
    assert "before the end" in page.text
    whole = gzip.decompress(reader.get(f"/runs/{run.id}/log/download").content)
    assert b"before the end\n" in whole
    assert b"ValueError: wrong\n" in whole
    assert server["HALFSTEP_TOKEN"].encode() not in whole


def test_a_run_is_reproduced_from_its_page(
    tmp_path: Path, database: Database, server: dict[str, str], token: str
) -> None:
    """`halfstep run reproduce` prints commands that restore files and command of a run."""
    origin, work = tmp_path / "origin.git", tmp_path / "work"
    options = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (
        ["init", "-q", "--bare", str(origin)],
        ["clone", "-q", str(origin), str(work)],
        ["-C", str(work), "commit", "-q", "--allow-empty", "-m", "first"],
        ["-C", str(work), "push", "-q", "origin", "HEAD"],
    ):
        subprocess.run(["git", *options, *words], check=True, stderr=subprocess.DEVNULL)
    (work / "train.py").write_text(
        'import halfstep\nhalfstep.watch().log({"a": 1})\nprint("ran")\n'
    )
    environment = {**os.environ, **server, "HALFSTEP_GIT": "yes"}
    argv = [sys.executable, "train.py", "--name", "a b"]
    with warm.Popen(argv, cwd=work, env=environment) as script:
        assert script.wait(SECONDS) == 0
    until(lambda: (run := the_run(database)) is not None and run.status == Status.FINISHED)
    run = the_run(database)
    assert run is not None
    own = server | {"HALFSTEP_TOKEN": token}
    typed = halfstep("run", "reproduce", str(run.id), **own)
    assert typed.stderr == ""
    printed = typed.stdout
    assert f"git clone -- {origin} run-{run.id}\ncd run-{run.id}\n" in printed
    assert printed.endswith("python train.py --name 'a b'\n") or "train.py --name 'a b'" in printed
    packages = halfstep("run", "reproduce", str(run.id), "--requirements", **own).stdout
    assert "msgspec==" in packages
    patch = halfstep("run", "reproduce", str(run.id), "--patch", **own).stdout
    lines = [line for line in printed.splitlines() if line.startswith(("git clone", "git check"))]
    clone = "\n".join([lines[0], f"cd run-{run.id}", lines[1], "git apply", "cat train.py"])
    again = subprocess.run(
        ["sh", "-ec", clone], cwd=tmp_path, input=patch, text=True, capture_output=True, check=True
    )
    assert again.stdout == (work / "train.py").read_text()
    refused = halfstep("run", "reproduce", str(run.id), "--queue", **own)
    assert (refused.returncode, "allowed: https://" in refused.stderr) == (2, True)


def test_a_script_in_a_terminal_ends_with_its_whole_log(
    tmp_path: Path, database: Database, server: dict[str, str], reader: httpx2.Client
) -> None:
    """In a terminal the log is complete: the uploader does not keep the sidecar alive."""
    (tmp_path / "train.py").write_text("import halfstep\nhalfstep.watch()\nprint('all of it')\n")
    mine, theirs = os.openpty()
    environment = {**os.environ, **server, "HALFSTEP_CONSOLE": "yes"}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    script = warm.Popen([sys.executable, "train.py"], cwd=tmp_path, env=environment, **streams)
    os.close(theirs)
    assert script.wait(SECONDS) == 0
    until(lambda: (run := the_run(database)) is not None and run.status == Status.FINISHED)
    run = the_run(database)
    assert run is not None
    whole = gzip.decompress(reader.get(f"/runs/{run.id}/log/download").content)
    assert whole.endswith(b"all of it\n")
    os.close(mine)
