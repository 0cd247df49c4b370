"""Sweep agents with a real server: functions, commands, and several agents at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from sqlalchemy import select, update

import halfstep
from db.clock import now
from db.database import Database
from db.settings import Settings
from db.sweeps import agent_claims, sweeps
from db.tables import Membership, Project, Run, Status, Trial, User
from halfstep import ApiError, Client, sweep_agent
from halfstep.cli import main as cli
from halfstep.session import active_run
from halfstep.sweep_agent import Agent, run_command
from tests.app.conftest import serving
from tests.db.telemetry.telemetry_made import read_logged_points
from tests.site import SECONDS, is_running, until

SCRIPT = """
import sys
import halfstep
from halfstep import sweep_agent

watch = halfstep.watch(config={"lr": 9.0, "depth": 3})
assert watch.config == {"lr": float(sys.argv[1]), "depth": 3, "seed": 7}, watch.config
watch.log({"score": 1 - watch.config["lr"]}, step=1)
if len(sys.argv) > 2:
    print("begun", flush=True)
    sys.stdin.readline()
"""

ENDLESS = """
import time
import halfstep
from halfstep import sweep_agent

watch = halfstep.watch(system=False)
for step in range(6000):
    watch.log({"score": -step}, step=step)
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def known(
    tmp_path: Path, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A server and a token that only uploads; nothing stays watched afterwards."""
    monkeypatch.chdir(tmp_path)
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    yield
    halfstep.finish()
    if active_run.active:
        active_run.active.finish()


def begin(**changes: Any) -> int:
    """Begin a sweep over three learning rates."""
    options: dict[str, Any] = {"metric": "score", "goal": "maximise"}
    with Client() as client:
        space = {"lr": [0.1, 0.2, 0.3]}
        return client.begin_agent_sweep(space, {"seed": 7}, **(options | changes))["id"]


def trials(database: Database) -> list[tuple[float, str, float | None]]:
    """Return rate, state and value of each trial."""
    with database.reading() as session:
        rows = session.scalars(select(Trial).order_by(Trial.number))
        return [(row.params["lr"], row.state, row.value) for row in rows]


def test_a_function_runs_for_each_point(database: Database) -> None:
    """A function runs once a point with its settings; an exception fails one trial."""
    seen = []

    def train() -> None:
        watch = halfstep.watch(config={"lr": 9.0})
        seen.append(watch.config)
        watch.log({"score": watch.config["lr"]}, step=1)
        if watch.config["lr"] == 0.2:
            raise ValueError("it diverged")

    sweep_id = begin()
    assert halfstep.agent(sweep_id, train) == (2, 1)
    assert seen == [{"lr": rate, "seed": 7} for rate in (0.1, 0.2, 0.3)]
    expected = [(0.1, "complete", 0.1), (0.2, "failed", None), (0.3, "complete", 0.3)]
    until(lambda: trials(database) == expected)
    with database.reading() as session:
        failed = session.scalars(select(Run).where(Run.name == "lr=0.2")).one()
        assert "it diverged" in str(failed.error)


def test_a_count_limits_an_agent(database: Database) -> None:
    """An agent with a count stops after it, and other agents get the remaining points."""
    sweep_id = begin()
    assert halfstep.agent(sweep_id, lambda: halfstep.watch() and None, count=1) == (1, 0)
    assert [rate for rate, _state, _value in trials(database)] == [0.1]


def test_a_function_that_watches_nothing_fails(database: Database) -> None:
    """The trial of a function that watches nothing fails with this reason."""
    sweep_id = begin()
    assert halfstep.agent(sweep_id, lambda: None, count=1) == (1, 0)
    assert trials(database) == [(0.1, "failed", None)]


def test_an_unknown_sweep_or_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown sweep or server is reported in one sentence, and nothing runs."""
    with pytest.raises(ApiError, match="There is no sweep 99"):
        halfstep.agent(99, lambda: None)
    with pytest.raises(ApiError, match="allowed: the number of a sweep"):
        halfstep.agent("digits", lambda: None)
    monkeypatch.delenv("HALFSTEP_TOKEN")
    with pytest.raises(ApiError, match="no server is configured"):
        halfstep.agent(1, lambda: None)


def test_a_wrong_placeholder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A command with an unknown placeholder is refused by its name, and the point is returned."""
    sweep_id = begin()
    with pytest.raises(SystemExit):
        cli.main(["agent", str(sweep_id), "--", "python", "train.py", "{rate}"])
    assert "{rate} is no setting of sweep 1; allowed: seed, lr" in capsys.readouterr().err


def agent(sweep_id: int, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "halfstep.cli.main", "agent", str(sweep_id), "--"]
    # If the tests are a background job of a shell, a child ignores SIGINT by default.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{interruptible}; import sys; from halfstep.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *command[3:]]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [*command, sys.executable, "train.py", "{lr}", *words],
        text=True,
        start_new_session=True,
        **pipes,
    )


@pytest.mark.extended
def test_two_agents_run_a_command_and_none_twice(database: Database) -> None:
    """Two agents with a command finish each point once."""
    sweep_id = begin()
    agents = [agent(sweep_id) for _ in range(2)]
    said = [each.communicate(timeout=SECONDS) for each in agents]
    assert [each.returncode for each in agents] == [0, 0], said
    expected = [(rate, "complete", 1 - rate) for rate in (0.1, 0.2, 0.3)]
    until(lambda: trials(database) == expected)
    with database.reading() as session:
        assert [run.status for run in session.scalars(select(Run))] == [Status.FINISHED] * 3


@pytest.mark.extended
def test_a_killed_agents_point_is_run_by_another(database: Database) -> None:
    """After kill -9 of an agent and its script, another agent runs the point."""
    sweep_id = begin()
    first = agent(sweep_id, "wait")
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    with database.writing() as session:  # a minute later
        session.execute(update(Trial).values(lease_expires_at=now() - 1))
    agent(sweep_id).communicate(timeout=SECONDS)
    expected = [(rate, "complete", 1 - rate) for rate in (0.1, 0.2, 0.3)]
    until(lambda: trials(database) == expected)
    with database.reading() as session:
        names = [run.name for run in session.scalars(select(Run).order_by(Run.id))]
        assert sorted(names) == ["lr=0.1", "lr=0.1", "lr=0.2", "lr=0.3"]


@pytest.mark.extended
def test_ctrl_c_gives_the_point_back(database: Database) -> None:
    """After Ctrl-C the point is returned at once, and the next agent starts with it."""
    sweep_id = begin()
    first = agent(sweep_id, "wait")
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    os.killpg(first.pid, signal.SIGINT)
    first.communicate(timeout=SECONDS)
    assert halfstep.agent(sweep_id, lambda: halfstep.watch() and None, count=1) == (1, 0)
    assert [rate for rate, _state, _value in trials(database)] == [0.1]


def test_sigterm_ends_the_command_and_gives_the_point_back(database: Database) -> None:
    """SIGTERM to the agent, as from a process manager, ends its command and returns the point."""
    handler = signal.getsignal(signal.SIGTERM)
    sweep_id = begin()
    first = agent(sweep_id, "wait")
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    family = psutil.Process(first.pid).children(recursive=True)
    first.terminate()
    assert first.wait(SECONDS) == 128 + signal.SIGTERM
    assert family
    until(lambda: not any(map(is_running, family)))
    first.communicate()
    assert halfstep.agent(sweep_id, lambda: halfstep.watch() and None, count=1) == (1, 0)
    assert [rate for rate, _state, _value in trials(database)] == [0.1]
    assert signal.getsignal(signal.SIGTERM) is handler


def hear(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the agent's messages from now on.

    pytest's own capture may lose messages of another thread while it is read.
    """
    sayings: list[str] = []
    say = sweep_agent.say

    def note(text: str) -> None:
        say(text)
        sayings.append(text)

    monkeypatch.setattr(sweep_agent, "say", note)
    return sayings


def test_an_agent_outlives_an_outage_of_the_server(
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent waits for its server before it claims a point, and before it reports the end."""
    sweep_id = begin()
    with serving(settings, database) as (_server, address):
        monkeypatch.setenv("HALFSTEP_URL", address)
    port = urlsplit(address).port or 0
    servers = []
    sayings = hear(monkeypatch)

    def revive() -> None:
        until(lambda: any("retrying" in said for said in list(sayings)))
        sayings.clear()
        servers.append(serving(settings, database, port))
        servers[-1].__enter__()

    def train() -> None:
        servers[-1].__exit__()
        revivals.submit(revive)

    with ThreadPoolExecutor(1) as revivals:
        revivals.submit(revive)
        assert halfstep.agent(sweep_id, train, count=1) == (1, 0)
    servers[-1].__exit__()
    assert len(servers) == 2
    assert trials(database) == [(0.1, "failed", None)]  # it watched nothing, as reported at its end


def begin_another(path: Path) -> None:
    """Begin a sweep on this process's server, in a spawned process."""
    path.write_text(str(begin()))


@pytest.mark.extended
def test_a_process_spawned_by_a_function_has_the_agents_server(
    tmp_path: Path, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a function spawns uses the agent's server, however it was passed."""
    sweep_id = begin()
    for name in server:
        monkeypatch.delenv(name)
    path = tmp_path / "another"

    def train() -> None:
        halfstep.watch()
        child = multiprocessing.get_context("spawn").Process(target=begin_another, args=[path])
        child.start()
        child.join()

    given = {"url": server["HALFSTEP_URL"], "token": server["HALFSTEP_TOKEN"]}
    assert halfstep.agent(sweep_id, train, count=1, **given) == (1, 0)
    assert path.read_text() == str(sweep_id + 1)


def test_an_interrupted_agent_gives_its_point_back_after_an_outage(
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent interrupted during an outage retries until it has returned its point."""
    sweep_id = begin()
    monkeypatch.setattr("halfstep.sweep_agent.GRACE_SECONDS", SECONDS)
    servers = [serving(settings, database)]
    address = servers[0].__enter__()[1]
    monkeypatch.setenv("HALFSTEP_URL", address)
    sayings = hear(monkeypatch)

    def revive() -> None:
        until(lambda: any("retrying" in said for said in list(sayings)))
        sayings.clear()
        servers.append(serving(settings, database, urlsplit(address).port or 0))
        servers[-1].__enter__()

    def interrupt() -> None:
        servers[-1].__exit__()
        revival.append(revivals.submit(revive))
        raise KeyboardInterrupt

    revival: list[Future[None]] = []
    with ThreadPoolExecutor(1) as revivals:
        with pytest.raises(KeyboardInterrupt):
            halfstep.agent(sweep_id, interrupt)
        revival[0].result()
    assert halfstep.agent(sweep_id, lambda: halfstep.watch() and None, count=1) == (1, 0)
    servers[-1].__exit__()
    assert [rate for rate, _state, _value in trials(database)] == [0.1]


class BusyClient(Client):
    """A client whose server accepts a point's end only after a lease renewal."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ending, self.is_renewed = threading.Event(), threading.Event()

    def claim_point(self, sweep_id: int, agent: str) -> Any:
        claim: Any = super().claim_point(sweep_id, agent)
        return claim | {"lease_seconds": 0.2}

    def renew_claim(self, sweep_id: int, number: int, agent: str) -> bool:
        was_ending = self.is_ending.is_set()
        is_active = super().renew_claim(sweep_id, number, agent)
        if was_ending and is_active:
            self.is_renewed.set()
        return is_active

    def end_claim(self, sweep_id: int, number: int, agent: str, *, was_watched: bool) -> None:
        self.is_ending.set()
        if not self.is_renewed.is_set():
            raise ApiError(503, "the server is busy")
        super().end_claim(sweep_id, number, agent, was_watched=was_watched)


def test_a_lease_is_renewed_while_the_end_is_retried(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed while a report is retried, so no other agent gets the point."""
    sweep_id = begin()
    monkeypatch.setattr("halfstep.api_client.polling.AWAY_SECONDS", SECONDS)
    with BusyClient() as client:
        assert Agent(client, sweep_id).run(lambda _claim, _is_lost: True, count=1) == (1, 0)
        assert client.is_renewed.is_set()
    assert trials(database) == [(0.1, "failed", None)]  # it watched nothing, as reported at its end


def test_wandb_sweeps_are_served(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """`wandb.sweep` and `wandb.agent` work with W&B's configuration; ignored keys are reported."""
    wandb: Any = halfstep
    config = {
        "method": "grid",
        "metric": {"name": "score", "goal": "maximize", "target": 0.9},
        "parameters": {"lr": {"values": [0.1, 0.2]}, "optimizer": {"value": "adam"}},
    }
    seen = []

    def train() -> None:
        with wandb.init(config={"lr": 9.0, "depth": 3}) as run:
            seen.append(dict(run.config))
            run.log({"score": run.config.lr})

    wandb.agent(wandb.sweep(config), function=train)
    assert "sweep(metric.target=…) is not supported" in capsys.readouterr().err
    base = {"depth": 3, "optimizer": "adam"}
    assert seen == [base | {"lr": 0.1}, base | {"lr": 0.2}]
    until(lambda: [state for _, state, _ in trials(database)] == ["complete", "complete"])
    with pytest.raises(wandb.Error, match="allowed: grid, random, bayes"):
        wandb.sweep({"method": "magic", "parameters": {"lr": {"values": [1]}}})
    assert sweeps.OPEN not in {state for _, state, _ in trials(database)}
    with pytest.raises(halfstep.ApiError, match="agent\\(\\) needs a function"):
        wandb.agent("1")
    assert wandb.agent("entity/project/1", train, forward_signals=True) == (0, 0)


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_trial_with_wandb_that_raises_costs_no_other(database: Database, mode: Any) -> None:
    """If a W&B trial raises, its values are kept, and the next one has its own run and settings."""
    wandb: Any = halfstep
    config = {
        "method": "grid",
        "metric": {"name": "score", "goal": "maximize"},
        "parameters": {"lr": {"values": [0.1, 0.2, 0.3, 0.4]}},
    }
    wandb.init(name="before the sweep")
    seen = []

    def train() -> None:
        is_raising = len(seen) == 1
        run = wandb.init(mode=mode if is_raising else None)
        seen.append((run.id, wandb.config.lr if not run.disabled else 0.2))
        if is_raising:
            wandb.log({"collected": 7.0}, commit=False)
            raise ValueError("it diverged")
        wandb.config.update({"lr": 9.0, "depth": 3})  # the sweep's settings win
        wandb.log({"score": wandb.config.lr})

    assert wandb.agent(wandb.sweep(config), train) == (3, 1)
    assert [rate for _, rate in seen] == [0.1, 0.2, 0.3, 0.4]
    assert len({identifier for identifier, _ in seen}) == 4
    expected = [(0.1, "complete", 0.1), (0.2, "failed", None)]
    expected += [(0.3, "complete", 0.3), (0.4, "complete", 0.4)]
    until(lambda: trials(database) == expected)
    if mode is None:
        with database.reading() as session:
            failed = session.scalars(select(Run.id).where(Run.name == "lr=0.2")).one()
            assert [point.value for point in read_logged_points(session, failed, "collected")] == [
                7.0
            ]


def test_wandb_distributions_and_early_terminate_are_served(database: Database) -> None:
    """W&B's distributions, probabilities and early_terminate are supported."""
    wandb: Any = halfstep
    parameters: dict[str, Any] = {
        "a": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1},
        "b": {"distribution": "q_log_uniform_values", "q": 8, "min": 32, "max": 256},
        "c": {"distribution": "log_uniform", "min": -3, "max": 0},
        "d": {"distribution": "inv_log_uniform_values", "min": 0.1, "max": 10},
        "e": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.25},
        "f": {"distribution": "normal", "mu": 5, "sigma": 0.1},
        "g": {"distribution": "q_log_normal", "mu": 3, "sigma": 0.1, "q": 1},
        "h": {"values": ["x", "y"], "probabilities": [0.0, 1.0]},
        "i": {"distribution": "inv_log_uniform", "min": 0, "max": 3},
    }
    config = {"method": "random", "metric": {"name": "acc", "goal": "maximize"}, "run_cap": 3}
    config |= {"parameters": parameters, "early_terminate": {"type": "hyperband", "min_iter": 2}}
    drawn: list[dict[str, Any]] = []

    def train() -> None:
        with wandb.init() as run:
            drawn.append(dict(run.config))

    number = wandb.sweep(config)
    wandb.agent(number, function=train)
    assert len(drawn) == 3
    for point in drawn:
        assert 1e-4 <= point["a"] <= 1e-1
        assert point["b"] % 8 == 0
        assert min(point["c"], point["i"]) >= 0.0497
        assert max(point["c"], point["i"]) <= 1
        assert 0.1 <= point["d"] <= 10
        assert point["e"] * 4 == int(point["e"] * 4)
        assert 4 < point["f"] < 6
        assert type(point["g"]) is int
        assert point["h"] == "y"
    with database.reading() as session:
        pruner = sweeps.get(session, int(number)).pruner
    assert pruner == {"kind": "hyperband", "first": 2, "factor": 3, "last": None, "patience": 3}
    with pytest.raises(wandb.Error, match="type hyperband"):
        wandb.sweep(config | {"early_terminate": {"type": "magic"}})


def without_heartbeats(client: Client, sweep_id: int, agent: str) -> Any:
    """Claim a point with a lease so long that no heartbeat reports its end."""
    return {**claim_point(client, sweep_id, agent), "lease_seconds": 1e6}


claim_point = Client.claim_point


def test_a_function_ends_with_its_run(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function whose run is pruned is interrupted as soon as it logs, which is no failure."""
    monkeypatch.setattr(Client, "claim_point", without_heartbeats)
    sweep_id, rates = begin(), []

    def train() -> None:
        watch = halfstep.watch(system=False)
        rates.append(watch.config["lr"])
        if len(rates) > 1:
            return
        with database.writing() as session:
            sweeps.get(session, sweep_id, lock=True)
            trial = session.get_one(Trial, (sweep_id, 1))
            assert agent_claims.prune(session, trial, "pruned")
        steps = count(1)
        until(lambda: watch.log({"score": 1.0}, step=next(steps)))

    assert halfstep.agent(sweep_id, train, count=2) == (2, 0)
    assert rates == [0.1, 0.2]
    assert trials(database)[0][1] == "failed"  # it has logged no value


def test_a_pruned_command_ends_at_its_next_values(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command whose metric gets worse is sent SIGTERM as soon as it logs, which is no failure."""
    monkeypatch.setattr(Client, "claim_point", without_heartbeats)
    Path("train.py").write_text(ENDLESS)
    sweep_id = begin(pruner={"kind": "patient", "patience": 1})
    words = (sys.executable, "train.py")
    with Client() as client:
        assert run_command(client, sweep_id, words, count=1) == (1, 0)
    assert trials(database)[0][1] == "pruned"


def test_a_sweep_creates_its_project(database: Database) -> None:
    """A sweep of an admin creates its project; other users get the allowed projects."""
    wandb: Any = halfstep
    config = {"method": "grid", "parameters": {"lr": {"values": [0.1]}}}
    sweep_id = wandb.sweep(config, project="not there yet")
    wandb.agent(sweep_id, lambda: wandb.init(project="another").log({"loss": 1.0}))
    with database.reading() as session:
        assert session.scalars(select(Run.project)).all() == ["not there yet"]
        assert session.get(Project, "not there yet") is not None
        assert session.get(Project, "another") is None
    with database.writing() as session:
        session.execute(update(User).values(is_admin=False))
        session.add(Membership(project="not there yet", user_id=1, role="member"))
    wandb.sweep(config, project="not there yet")
    with pytest.raises(wandb.Error, match="'new' is not valid; allowed: 'not there yet'"):
        wandb.sweep(config, project="new")
