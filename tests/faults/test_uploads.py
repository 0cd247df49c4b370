"""A watched script, its uploader and the server are killed in turn: each step arrives once."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import select

from db.access import accounts
from db.tables import Run, Status
from db.telemetry import step_rows
from db.telemetry.pyramid import END
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.run_folder import last_step
from tests import warm
from tests.faults.conftest import COUNTS, often
from tests.faults.kills_made import serving
from tests.halfstep.telemetry.uploader_made import uploaders
from tests.site import SECONDS, Site, free_port, until

SCRIPT = """
import sys, time, torch
import halfstep

net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
watch = halfstep.watch(net, run="mine")
steps, seconds = int(sys.argv[1]), float(sys.argv[2])
for step in range(steps):
    net(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(seconds)
"""


@pytest.mark.only_on("postgresql")
def test_each_step_that_was_spooled_arrives_once(site: Site, tmp_path: Path) -> None:
    """After any kill the next attempt continues the steps, and nothing is sent twice."""
    rounds, port = often(full=20, short=1), free_port()
    with site.database.writing() as session:
        token, _row = accounts.make_api_token(session, site.owner, "writer", kind="write")
    server = {"HALFSTEP_URL": f"http://127.0.0.1:{port}", "HALFSTEP_TOKEN": token}
    script, folder = tmp_path / "train.py", tmp_path / "halfstep-runs" / "mine"
    script.write_text(SCRIPT)

    def train(*words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, script.name, *words]
        return warm.Popen(command, cwd=tmp_path, env={**os.environ, **server})

    def list_recorded() -> list[int]:
        with site.database.reading() as session:
            run_ids = session.scalars(select(Run.id))
            runs = [step_rows.read_rows(session, run_id, most=END) for run_id in run_ids]
            return sorted(row.step for rows in runs for row in rows)

    def grows() -> None:
        before = len(list_recorded())
        until(lambda: len(list_recorded()) >= before + 5)

    with ExitStack() as stack:
        servers = [stack.enter_context(serving(site, port))]
        training = train("1000000", "0.02")
        for _ in range(rounds):
            grows()
            for uploader in uploaders(folder):
                uploader.kill()
            training.kill()  # which starts no other uploader: the next attempt has to
            training.wait()
            spooled = last_step(AttemptFiles(folder, 10**6))
            training = train("1000000", "0.02")
            until(lambda: len(list_recorded()) > spooled)  # noqa: B023 - called at once
            servers[-1].kill()
            servers[-1].wait()
            servers.append(stack.enter_context(serving(site, port)))
            grows()
            for uploader in uploaders(folder):
                uploader.kill()
        training.kill()
        training.wait()
        last = train("10", "0")
        assert last.wait(SECONDS) == 0
        until(lambda: the_run(site).status == Status.FINISHED)
        until(lambda: not uploaders(folder))
    run = the_run(site)
    spooled = last_step(AttemptFiles(folder, 10**6))
    assert list_recorded() == list(range(1, spooled + 1))
    assert (run.step, run.attempt) == (spooled, rounds + 2)
    COUNTS.append(f"script, uploader and server killed {rounds} times each: {spooled} steps, once")


def the_run(site: Site) -> Run:
    with site.database.reading() as session:
        return session.scalars(select(Run)).one()
