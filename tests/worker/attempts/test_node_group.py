"""Runs on several nodes: supervisors with separate disks, a database and a bucket."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sqlalchemy import select

from db.files import checkpoints
from db.queue import claims, node_groups, queue, run_control, workers
from db.runs import runs
from db.tables import RunNode, Status
from tests import warm
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit
from tests.marks import extended
from tests.site import DEAD, SECONDS, Site, is_running, until
from tests.trainer.conftest import assert_same_bits
from worker.attempts.attempt import LOST_LEASE, Outcome
from worker.attempts.node_group import combine_outcomes, make_reported_outcome
from worker.engine import Handle

pytestmark = pytest.mark.sql

LEASE_SECONDS = 12.0


class Machines:
    """Two machines with a disk and a worker each, and runs on both."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder = site, folder
        recipes = [DIGITS, {**DIGITS, "name": "gated", "reference": GATED}]
        recipes.append({**DIGITS, "name": "gpt"})
        self.workers = [add_worker(site.database, name, recipes, [CPU]) for name in ("m0", "m1")]
        self.supervisors: list[Any] = []

    def data(self, node: int) -> Path:
        return self.folder / f"machine-{node}"

    def submit(self, steps: int, **changes: Any) -> int:
        training = {"steps": steps, "batch_size": 16}
        values = {"config": {"precision": "fp16", "training": training}, **changes}
        with self.site.database.writing() as session:
            run = submit(session, self.site.owner, **values)
            run.nodes = 2
            return run.id

    def start(self, run_id: int) -> None:
        """Claim both nodes and start their supervisors."""
        with self.site.database.writing() as session:
            for worker in self.workers:  # so that none is silent on a busy machine
                workers.heartbeat(session, worker.id)
            run = claims.claim(
                session,
                self.workers[0].id,
                recipes=["digits", "gpt", "gated", "failing"],
                precisions=["fp16"],
                free_devices=[0],
                lease_seconds=LEASE_SECONDS,
                only=run_id,
            )
            assert run is not None
        self.supervisors = [self._supervisor(run_id, run.attempt, node) for node in (0, 1)]

    def _supervisor(self, run_id: int, attempt: int, node: int) -> Any:
        words = [str(each) for each in (run_id, attempt, node)]
        own = {
            "HALFSTEP_DATA": str(self.data(node)),
            "HALFSTEP_STORAGE_URL": f"file://{self.folder / 'bucket'}",
            "HALFSTEP_LEASE_SECONDS": str(LEASE_SECONDS),
            "HALFSTEP_GATE": str(self.folder / "gate"),
        }
        (self.folder / "bucket").mkdir(exist_ok=True)
        return warm.Popen(
            [sys.executable, "-m", "worker.attempts.supervisor", *words],
            env={**os.environ, **self.site.environment, **own},
        )

    def wait(self) -> None:
        for supervisor in self.supervisors:
            supervisor.wait(SECONDS)

    def family(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.supervisors[node].pid).children(recursive=True)

    def checkpoint(self, run_id: int, step: int) -> Any:
        folder = self.folder / "bucket" / "runs" / str(run_id) / "checkpoints"
        return torch.load(folder / f"step-{step:08d}.pt", weights_only=True)


GATED = f"{Path(__file__).parents[2] / 'gated.py'}:Gated"


def nodes(site: Site, run_id: int, attempt: int = 1) -> list[RunNode]:
    with site.database.reading() as session:
        query = select(RunNode).where(RunNode.run_id == run_id, RunNode.attempt == attempt)
        return list(session.scalars(query.order_by(RunNode.node)))


@pytest.fixture
def machines(site: Site, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(site, tmp_path)
    yield made
    for supervisor in made.supervisors:
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()


#: Sizes of the tests; the first one's scale is too large for some steps, which all ranks skip.
SMALL = {
    "digits": {"scaler": {"init_scale": 2.0**30}},
    "gpt": {
        "recipe": {"layers": 1, "width": 32, "heads": 2, "context": 16, "max_bytes": 20000},
        "training": {"parallel": "fsdp"},
    },
}


@pytest.mark.extended
@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize("recipe", ["digits", *extended(["gpt"])])
def test_two_nodes_train_what_two_devices_do(machines: Machines, site: Site, recipe: str) -> None:
    """Two nodes end with the bits of two devices, by ddp and in shards."""
    training = {"steps": 20, "batch_size": 16, **SMALL[recipe].get("training", {})}
    asked = {"precision": "fp16", **SMALL[recipe], "training": training}
    run_id = machines.submit(20, recipe=recipe, config=asked)
    machines.start(run_id)
    machines.wait()
    run = site.run(run_id)
    assert (run.status, run.step, run.error) == (Status.FINISHED, 20, None)
    assert (run.skipped > 0) == (recipe == "digits")
    assert [
        node.ending and node.ending["failure_kind"] for node in nodes(machines.site, run_id)
    ] == [
        None,
        None,
    ]
    assert all(node.ended_at for node in nodes(machines.site, run_id))
    alone = site.submit(20, recipe=recipe, devices_per_node=2, config=run.config)
    with site.worker(HALFSTEP_CPU_DEVICES="2"):
        assert site.wait(alone).status == Status.FINISHED
    path = site.data / "runs" / str(alone) / "checkpoints" / "step-00000020.pt"
    theirs, ours = torch.load(path, weights_only=True), machines.checkpoint(run_id, 20)
    for part in ("modules", "optimizers", "scaler", "random", "next_batch"):
        assert_same_bits(ours[part], theirs[part])


@pytest.mark.only_on("postgresql")
@pytest.mark.parametrize("victim", ["rank", *extended(["supervisor"])])
def test_what_dies_on_one_node_ends_the_attempt_on_all(
    machines: Machines, site: Site, victim: str
) -> None:
    """If a node dies, the run is queued again once no node can train, and resumes exactly."""
    run_id = machines.submit(100, recipe="gated")
    machines.start(run_id)
    until(lambda: site.run(run_id).step >= 2)
    families = [*machines.family(0), *machines.family(1)]
    [second] = [each for each in machines.family(1) if not each.children()]
    pid = second.pid if victim == "rank" else machines.supervisors[1].pid
    os.kill(pid, signal.SIGKILL)
    machines.wait()
    assert not any(map(is_running, families))
    run = site.run(run_id)
    assert (run.status, run.killed_attempts) == (Status.QUEUED, 1)
    with site.database.reading() as session:
        reason = runs.statuses(session, run_id)[-1].reason or ""
    assert reason.startswith("node 1 (m1)"), reason
    assert all(node.ended_at for node in nodes(machines.site, run_id))


@pytest.mark.extended
@pytest.mark.only_on("postgresql")
def test_a_pause_leaves_one_checkpoint_from_which_both_resume(
    machines: Machines, site: Site
) -> None:
    """After a pause both nodes resume to the same bits. Each rank has written its shards, the
    second machine has sent its own to the first, and gets all of them from the bucket.
    """
    training = {"steps": 30, "batch_size": 16, "parallel": "fsdp"}
    wanted = {"recipe": "gated", "config": {"precision": "fp16", "training": training}}
    whole, run_id = (machines.submit(30, **wanted) for _ in range(2))
    machines.start(run_id)
    until(lambda: site.run(run_id).step >= 2)
    with site.database.writing() as session:
        run_control.pause(session, run_id, site.owner)
    machines.wait()
    paused = site.run(run_id)
    assert (paused.status, paused.error) == (Status.PAUSED, None)
    assert 2 <= paused.step < 30
    with site.database.reading() as session:
        kinds = {row.kind for row in checkpoints.of_run(session, run_id)}
    assert kinds == {"checkpoint", "shard.0", "shard.1", "shard.metadata", "weights"}
    assert not list(machines.data(1).rglob("*.distcp"))
    (machines.folder / "gate").touch()
    with site.database.writing() as session:
        run_control.resume(session, run_id, site.owner)
    for each in (run_id, whole):
        machines.start(each)
        machines.wait()
        assert site.run(each).status == Status.FINISHED
    assert "resumed at step" in site.log(run_id)
    assert "exactly" in site.log(run_id)
    ours, theirs = (machines.checkpoint(each, 30) for each in (run_id, whole))
    for part in ("modules", "optimizers", "scaler", "random", "next_batch"):
        assert_same_bits(ours[part], theirs[part])


def test_who_is_to_blame_for_an_end() -> None:
    """A node's own error is the cause before a lost node, and that before errors about lost
    peers.
    """
    gone = Outcome(Status.FAILED, "Connection closed by peer", "Traceback", node_groups.RANK)
    code = node_groups.NodeOutcome("node 1 (m1): ValueError: no", "Traceback: no", "code")
    lost = node_groups.NodeOutcome("node 1 (m1) was lost", None, "infrastructure")
    nobody = node_groups.NodeOutcome()
    assert combine_outcomes(gone, code, None) == Outcome(
        Status.FAILED, code.reason, code.error, "code"
    )
    assert combine_outcomes(gone, lost, None) == Outcome(None, lost.reason)
    assert combine_outcomes(gone, nobody, None) == Outcome(None, gone.reason)
    own = Outcome(Status.FAILED, "ValueError: mine", "Traceback: mine", "code")
    assert combine_outcomes(own, code, None) is own
    assert combine_outcomes(Outcome(None, "was killed by SIGKILL"), lost, "node 2 (m2)") == Outcome(
        None, "node 2 (m2)"
    )
    paused = Outcome(Status.PAUSED)
    assert combine_outcomes(paused, lost, None) is paused
    assert (
        make_reported_outcome(paused).failure_kind,
        make_reported_outcome(own).failure_kind,
    ) == (
        None,
        "code",
    )
    assert (
        make_reported_outcome(Outcome(Status.QUEUED, LOST_LEASE)).failure_kind == "infrastructure"
    )


@pytest.mark.only_on("postgresql")
def test_an_error_on_the_second_node_is_the_runs(machines: Machines, site: Site) -> None:
    """An error on the second node is the run's, not the first node's lost peer."""
    text = "A rank of the second machine fails."
    recipe = machines.folder / "failing.py"
    recipe.write_text(
        "import os\n"
        "from tests.gated import Gated\n"
        "class Failing(Gated):\n"
        "    def training_step(self, batch):\n"
        f"        if os.environ['RANK'] == '1': raise ValueError({text!r})\n"
        "        yield from super().training_step(batch)\n"
    )
    offered = [{**DIGITS, "name": "failing", "reference": f"{recipe}:Failing"}]
    with site.database.writing() as session:
        for worker in machines.workers:
            workers.offer(session, worker.id, offered)
    run_id = machines.submit(20, recipe="failing")
    machines.start(run_id)
    machines.wait()
    run = site.run(run_id)
    assert (run.status, run.failure_kind) == (Status.FAILED, "code")
    assert text in (run.error or "")
    assert "[node 1] " in site.log(run_id)


@pytest.mark.extended
@pytest.mark.only_on("postgresql")
def test_workers_start_their_nodes_of_what_one_of_them_claimed(site: Site, tmp_path: Path) -> None:
    """Workers with separate disks start their nodes of a claimed run, which then ends and frees
    both.
    """
    run_id = site.submit(steps=20, nodes=2)
    bucket = {"HALFSTEP_STORAGE_URL": f"file://{tmp_path / 'bucket'}"}
    (tmp_path / "bucket").mkdir()
    with (
        site.worker("w1", HALFSTEP_DATA=str(tmp_path / "one"), **bucket),
        site.worker("w2", HALFSTEP_DATA=str(tmp_path / "two"), **bucket),
    ):
        run = site.wait(run_id)
    assert (run.status, run.step, site.count_steps(run_id)) == (Status.FINISHED, 20, 20)
    with site.database.reading() as session:
        nodes = session.scalars(select(RunNode).where(RunNode.run_id == run_id)).all()
    assert [(node.attempt, node.devices) for node in nodes] == [(1, [0])] * 2
    assert len({node.worker_id for node in nodes}) == 2
    assert all(node.ended_at for node in nodes)


def test_a_node_waits_until_what_its_device_did_before_has_ended(site: Site) -> None:
    """A node starts once its device's earlier supervisor has ended, even if the run has.

    If that dies before, the first node detects it, and closes nothing.
    """
    worker, other = site.idle_worker(), add_worker(site.database, "other", [DIGITS], [CPU])
    run_id = site.submit(nodes=2)
    with site.database.writing() as session:
        run = claim(session, other, free_devices=[0])
        assert run is not None
        assert run.id == run_id
    busy = RunNode(run_id=99, attempt=1, node=0, devices=[0])
    worker.running.nodes = {(99, 1): (Handle(os.getpid(), 0, ""), busy)}
    worker._pick_up()
    assert list(worker.running.nodes) == [(99, 1)]
    [mine] = [node for node in nodes(site, run_id) if node.worker_id == worker.id]
    worker.running.nodes = {(run_id, 1): (DEAD, mine)}
    worker._reap()
    assert worker.running.nodes == {}
    with site.database.reading() as session:
        first, second = queue.node(session, run_id, 1), queue.node(session, run_id, 1, 1)
        assert (first.ended_at, second.worker_id) == (None, worker.id)
        assert second.ended_at is not None
        assert (second.ending or {})["failure_kind"] == "infrastructure"
        assert runs.get(session, run_id).status == Status.STARTING


def test_a_first_node_whose_supervisor_died_is_closed_after_the_others(site: Site) -> None:
    """If a first node's supervisor dies, the run is closed after the other nodes have ended."""
    worker, other = site.idle_worker(), add_worker(site.database, "other", [DIGITS], [CPU])
    run_id = site.submit(nodes=2)
    attempt = site.lost_attempt(worker, run_id)
    worker._reap()
    assert list(worker.running.nodes) == [attempt]
    with site.database.writing() as session:
        assert "supervisor died" in (node_groups.stop_reason(session, run_id, 1, 1, 60.0) or "")
        assert queue.nodes_of_worker(session, other.id) != []
        node_groups.record_outcome(
            session, run_id, 1, 1, node_groups.NodeOutcome("another node is lost")
        )
    worker._reap()
    assert worker.running.nodes == {}
    assert site.run(run_id).status == Status.QUEUED
