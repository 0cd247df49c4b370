"""SIGKILL of agents and server during a sweep: each point has one result."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from sqlalchemy import func, select

from db.access import accounts
from db.clock import now
from db.sweeps import sweeps
from db.tables import Run, Status, Trial
from halfstep import Client
from tests import warm
from tests.faults.kills_made import serving
from tests.site import SECONDS, Site, free_port, is_running, until

RATES = [0.1, 0.2, 0.3, 0.4, 0.5]
#: It waits with its point until the gate is open.
SCRIPT = """
import os
import sys
import time
from pathlib import Path
import halfstep

watch = halfstep.watch(system=False)
rate = watch.config["lr"]
for step in range(10):
    watch.log({"score": rate + step - 9}, step=step)
Path(f"begun-{rate}").write_text(str(os.getppid()))
while not Path("gate").exists():
    time.sleep(0.05)
watch.log({"score": rate}, step=10)
"""


@pytest.mark.sql
def test_killed_agents_and_a_killed_server_cost_a_sweep_no_trial(
    site: Site, tmp_path: Path
) -> None:
    """After a SIGKILL of an agent with its script, of one without it and of the server, another
    agent runs all points, and each is counted once.
    """
    with site.database.writing() as session:
        token, _row = accounts.make_api_token(session, site.owner, "agents")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (tmp_path / "train.py").write_text(SCRIPT)
    with ExitStack() as stack:
        server = stack.enter_context(serving(site, port))
        client = stack.enter_context(Client(url, token))
        sweep = client.begin_agent_sweep({"lr": RATES}, metric="score", goal="maximize")

        def start() -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-m", "halfstep.cli.main", "agent", str(sweep["id"]), "--"]
            return warm.Popen(
                [*command, sys.executable, "train.py"],
                env={**os.environ, "HALFSTEP_URL": url, "HALFSTEP_TOKEN": token},
                cwd=tmp_path,
                start_new_session=True,
            )

        lost, orphaned, alive = (start() for _ in range(3))
        until(lambda: len(begun(tmp_path)) == 3)
        [script] = psutil.Process(orphaned.pid).children()
        os.killpg(lost.pid, signal.SIGKILL)
        orphaned.kill()
        server.kill()
        for process in (lost, orphaned, server):
            process.wait()
        stack.enter_context(serving(site, port))
        with site.database.writing() as session:  # a minute later
            for trial in session.scalars(select(Trial)):
                if begun(tmp_path)[trial.params["lr"]] != alive.pid:
                    trial.lease_expires_at = now() - 1
        others = [start() for _ in range(2)]
        until(lambda: count_cancelled(site) == 2)
        (tmp_path / "gate").touch()
        assert [agent.wait(SECONDS) for agent in (alive, *others)] == [0, 0, 0]
        until(lambda: not is_running(script))
        until(lambda: client.sweep(sweep["id"])["status"] == "finished")
    with site.database.reading() as session:
        trials = sweeps.all_trials(session, sweeps.get(session, sweep["id"]))
        assert [(row.params["lr"], row.state, row.value) for row in trials] == [
            (rate, "complete", rate) for rate in RATES
        ]
        runs = [(run.status, run.name) for run in session.scalars(select(Run))]
    finished = sorted(name for status, name in runs if status == Status.FINISHED)
    assert finished == [f"lr={rate}" for rate in RATES]
    assert len(runs) == len(RATES) + 2


def begun(folder: Path) -> dict[float, int]:
    """Return agents' process ids by the learning rate of the started script."""
    texts = {path.name: path.read_text() for path in folder.glob("begun-*")}
    return {float(name.removeprefix("begun-")): int(text) for name, text in texts.items() if text}


def count_cancelled(site: Site) -> int:
    with site.database.reading() as session:
        query = select(func.count()).where(Run.status == Status.CANCELLED)
        return session.scalar(query) or 0
