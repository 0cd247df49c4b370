"""Pilots by a real Slurm with its daemons and two nodes on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from db.queue import pending_reasons, run_control
from db.runs import runs
from db.settings import Settings
from db.tables import Status
from tests import slurm
from tests.site import GATED, Site, until
from tests.slurm import Slurm
from tests.trainer.conftest import assert_same_bits
from worker.clusters import placement
from worker.clusters.cluster import of_placement
from worker.clusters.placement import Pilots, PlacementRejected

pytestmark = pytest.mark.skipif(not slurm.is_installed(), reason="needs Debian's slurm-wlm, munge")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm.slurm(tmp_path_factory.mktemp("cluster") / "slurm") as made:
        yield made


@pytest.fixture
def engine(cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> placement.Placement:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return placement.open_placement(
        Settings(data=tmp_path, placement="slurm", slurm_options="--exclusive")
    )


@dataclass(frozen=True)
class Sleepers(Pilots):
    """Pilots that write their environment, and sleep."""

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", "echo $HALFSTEP_WORKER_NAME; sleep 1000"]


def test_a_job_is_placed_once_seen_and_cancelled(engine: placement.Placement) -> None:
    """Placing, polling and cancelling can be repeated; a job that needs more nodes than are free
    waits with the reason.
    """
    first, second = Sleepers(1, 1, 2, 1), Sleepers(2, 1, 2, 1)
    assert engine.poll(first).state == "gone"
    engine.place(first)
    engine.place(first)
    until(lambda: engine.poll(first).state == "running")
    until(lambda: engine.log(first).count("halfstep-1-1-") == 2)
    assert {*engine.log(first).split()} == {"halfstep-1-1-0", "halfstep-1-1-1"}
    engine.place(second)
    until(lambda: "no node with enough free devices" in engine.poll(second).reason)
    assert engine.poll(second).state == "waiting"
    for each in (first, second):
        engine.cancel(each)
        engine.cancel(each)
        until(lambda: engine.poll(each).state == "gone")  # noqa: B023
    assert "cancelled" in engine.poll(first).reason


def test_a_rejection_of_slurm_has_its_message(
    engine: placement.Placement, cluster: Slurm, tmp_path: Path
) -> None:
    """A rejected job has Slurm's message, as for an unknown partition or too many nodes."""
    wrong = Settings(data=tmp_path, placement="slurm", slurm_options="--partition=nowhere")
    with pytest.raises(PlacementRejected, match="invalid partition"):
        placement.open_placement(wrong).place(Sleepers(3, 1, 1, 1))
    large = Sleepers(4, 1, 50, 1)
    engine.place(large)
    until(lambda: "cannot provide the requested resources" in engine.poll(large).reason)
    engine.cancel(large)


def test_an_unreachable_slurm_rejects_no_run(
    engine: placement.Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable configuration is an outage, for which every call of the placer waits."""
    broken = tmp_path / "slurm.conf"
    broken.write_text("nonsense\n")
    monkeypatch.setenv("SLURM_CONF", str(broken))
    for ask in (engine.poll, engine.place, engine.cancel):
        with pytest.raises(OSError, match="squeue"):
            ask(Sleepers(6, 1, 1, 1))


def test_another_installation_has_other_jobs(engine: placement.Placement, tmp_path: Path) -> None:
    """Run 1 of one installation is not run 1 of another."""
    other = Settings(data=tmp_path / "other", placement="slurm")
    pilots = Sleepers(5, 1, 1, 1)
    engine.place(pilots)
    assert placement.open_placement(other).poll(pilots).state == "gone"
    engine.cancel(pilots)
    until(lambda: engine.poll(pilots).state == "gone")


def test_runs_train_where_slurm_puts_them(site: Site, cluster: Slurm, tmp_path: Path) -> None:
    """Each of two nodes has a worker for this run only. Near the time limit it leaves a
    checkpoint, is placed again, and resumes exactly; a cancelled one leaves Slurm's queue.
    """
    with placing(site, cluster, "--exclusive --time=10", lease_seconds=30):
        run_id = site.submit(steps=80, recipe="gated", nodes=2)
        second = site.submit(steps=80, recipe="gated", nodes=2)
        site.wait_for_step(run_id, 3)
        until(lambda: "no node with enough free devices" in why(site, second))
        with site.database.writing() as session:
            run_control.cancel(session, second, site.owner)
        until(lambda: "halfstep-2-1" not in cluster.ask("squeue", "-h", "-o", "%j"))
        cluster.ask("scancel", "--signal=USR2", "--name=halfstep-1-1")
        until(lambda: site.run(run_id).attempt == 2)
        site.open_gate()
        assert site.wait(run_id).status == Status.FINISHED
    assert site.run(run_id).killed_attempts == 0
    assert "exactly" in site.log(run_id)
    alone = site.submit(steps=80, recipe="gated", devices_per_node=2)
    with site.start_gated_worker("box", HALFSTEP_CPU_DEVICES="2"):
        assert site.wait(alone).status == Status.FINISHED
    folders = (site.data / "runs" / str(each) / "checkpoints" for each in (run_id, alone))
    ours, theirs = (torch.load(each / "step-00000080.pt", weights_only=True) for each in folders)
    for part in ("modules", "optimizers", "scaler", "random"):
        assert_same_bits(ours[part], theirs[part])


def test_a_node_is_checked_before_the_first_run(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's missing requirements are reported by the check, a missing partition by Slurm."""
    for name, value in {**cluster.environment, "HALFSTEP_DATA": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    said = "\n".join(map(str, of_placement(Settings(data=tmp_path, placement="slurm"))))
    assert "NO  on a node, database: sqlite:///" in said
    assert "ok  on a node, storage: " in said
    wrong = Settings(data=tmp_path, placement="slurm", slurm_options="--partition=nowhere")
    [line] = map(str, of_placement(wrong))
    assert line.startswith("NO  slurm: ")
    assert "invalid partition" in line


def test_a_node_whose_daemon_dies_is_a_machine_that_is_lost(
    site: Site, cluster: Slurm, tmp_path: Path
) -> None:
    """If a node's daemon dies, Slurm ends the job, and the expired lease queues the run again."""
    with placing(site, cluster, "--exclusive", lease_seconds=15):
        run_id = site.submit(steps=80, recipe="gated")
        site.wait_for_step(run_id, 3)
        name = cluster.ask("squeue", "-h", "-o", "%N").strip()
        cluster.kill_node(name)
        site.training(run_id).kill()
        until(lambda: site.run(run_id).attempt == 2)
        site.open_gate()
        assert site.wait(run_id).status == Status.FINISHED
    cluster.start_node(name)


@contextmanager
def placing(site: Site, cluster: Slurm, options: str, *, lease_seconds: int) -> Iterator[None]:
    """Run a placer with these options; yield once it offers the gated recipe."""
    own = {**cluster.environment, **site.environment, "HALFSTEP_PLACEMENT": "slurm"}
    own |= {"HALFSTEP_SLURM_OPTIONS": options, "HALFSTEP_LEASE_SECONDS": str(lease_seconds)}
    own |= {"HALFSTEP_RECIPES": GATED, "HALFSTEP_GATE": str(site.gate)}
    command = [sys.executable, "-m", "worker.clusters.placer"]
    with subprocess.Popen(command, env={**os.environ, **own}) as placer:
        try:
            until(lambda: site.offers("gated"))
            yield
        finally:
            placer.terminate()


def why(site: Site, run_id: int) -> str:
    """Return the pending reason of a queued run."""
    with site.database.reading() as session:
        return pending_reasons.reason(
            runs.get(session, run_id), pending_reasons.Queue.read(session)
        ).text
