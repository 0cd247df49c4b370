"""Pilots by a real Ray, with a head and two nodes on separate machines."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from db.queue import pending_reasons, run_control
from db.runs import runs
from db.settings import Settings
from db.tables import Placement, Status
from tests.clusters.machines import NET, can_make_machines
from tests.clusters.rays import PORT, Cluster, ray_cluster
from tests.site import Site, until
from worker.clusters.placement import Pilots
from worker.clusters.ray import Ray

pytestmark = [
    pytest.mark.only_on("postgresql"),
    pytest.mark.skipif(not can_make_machines(), reason="needs root and iproute2"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`"),
]
#: While the gate is shut, minutes of them.
STEPS = 3000


@pytest.fixture
def engine(site: Site, tmp_path: Path) -> Iterator[Ray]:
    """An engine outside of the cluster that is connected to it."""
    with ray_cluster(site, tmp_path) as cluster:
        settings = Settings(
            data=site.data, placement="ray", ray_address=cluster.address, ray_resource="CPU"
        )
        with closing(Ray(settings)) as made:
            until(lambda: _is_up(made))
            yield made


def _is_up(engine: Ray) -> bool:
    try:
        return engine.poll(Pilots(0, 0, 1, 1)).state == "gone"
    except OSError:
        return False


@dataclass(frozen=True)
class Sleepers(Pilots):
    """Pilots that write their environment, and sleep."""

    @property
    def command(self) -> list[str]:
        result = "$HALFSTEP_WORKER_NAME $(hostname) threads ${OMP_NUM_THREADS-any}, out of memory"
        return ["sh", "-c", f"echo {result} $(cat /proc/self/oom_score_adj); exec sleep 1000"]


def test_actors_are_placed_once_seen_and_cancelled(engine: Ray) -> None:
    """Placing, polling and cancelling can be repeated. A request that does not fit waits as a whole
    with the reason, an actor that cannot start its worker reports it, and a node lists all missing
    packages.
    """
    first, second, large = Sleepers(1, 1, 2, 1), Sleepers(2, 1, 2, 1), Sleepers(3, 1, 3, 1)
    assert engine.poll(first).state == "gone"
    engine.place(first)
    engine.place(first)
    until(lambda: engine.poll(first).state == "running")
    until(lambda: engine.log(first).count("halfstep-1-1-") == 2)
    names, hosts, rest = zip(
        *(line.split(maxsplit=2) for line in engine.log(first).splitlines()), strict=True
    )
    assert ({*names}, {*hosts}) == ({"halfstep-1-1-0", "halfstep-1-1-1"}, {"m1", "m2"})
    assert {*rest} == {"threads any, out of memory 0"}
    engine.place(second)
    until(lambda: "0 of 2 CPU are free" in engine.poll(second).reason)
    assert engine.poll(second).state == "waiting"
    engine.place(large)
    assert "3 x 1 CPU" in engine.poll(large).reason
    assert "and 2 of its nodes have as many" in engine.poll(large).reason
    for each in (first, second, large):
        engine.cancel(each)
        engine.cancel(each)
        until(lambda: engine.poll(each).state == "gone")  # noqa: B023
    said = "\n".join(map(str, engine.check()))
    assert "answers; CPU of its nodes: 1, 1" in said
    assert "ok  on a node, database: postgresql" in said
    assert "ok  on a node, interface: other nodes reach this machine at 10.213.77.1" in said


def test_a_run_trains_where_ray_has_room_and_outlives_its_head(site: Site, tmp_path: Path) -> None:
    """A run of two nodes survives the loss of the head and then of all Ray, in its first
    attempt. Another run waits with Ray's reason, and leaves Ray when it is cancelled.
    """
    with place_by_ray(site, tmp_path) as cluster:
        until(lambda: site.offers("gated"))
        run_id = site.submit(STEPS, recipe="gated", nodes=2)
        site.wait_for_step(run_id, 3)
        second = site.submit(STEPS, recipe="gated", nodes=2)
        until(lambda: "0 of 2 CPU are free" in why(site, second))
        with site.database.writing() as session:
            run_control.cancel(session, second, site.owner)
        until(lambda: placement_state(site, second) == "gone")
        cluster.kill_head()
        until(lambda: not cluster.is_there)
        site.wait_for_step(run_id, site.run(run_id).step + 5)
        site.open_gate()
        run = site.wait(run_id)
        assert (run.status, run.attempt) == (Status.FINISHED, 1)
        assert site.count_steps(run_id) == STEPS
        assert "placer: waiting: Ray" in (tmp_path / "placer.log").read_text()


def test_a_lost_node_costs_an_attempt_and_the_record_is_whole(site: Site, tmp_path: Path) -> None:
    """After a node is lost the lease expires, and Ray places the run on another node."""
    with place_by_ray(site, tmp_path) as cluster:
        until(lambda: site.offers("gated"))
        run_id = site.submit(STEPS, recipe="gated")
        site.wait_for_step(run_id, 3)
        lost = [node for node in cluster.nodes if (node.data / "runs" / str(run_id)).exists()]
        lost[0].switch_off()
        until(lambda: site.run(run_id).attempt == 2 and site.run(run_id).status == Status.RUNNING)
        site.open_gate()
        assert site.wait(run_id).status == Status.FINISHED
        assert site.count_steps(run_id) == STEPS


@contextmanager
def place_by_ray(site: Site, folder: Path) -> Iterator[Cluster]:
    """Start Ray with a placer on the head's machine."""
    placing = {"PLACEMENT": "ray", "RAY_RESOURCE": "CPU", "RAY_ADDRESS": f"{NET}.10:{PORT}"}
    result = {f"HALFSTEP_{name}": value for name, value in placing.items()}
    placer = f"{sys.executable} -m worker.clusters.placer >{folder}/placer.log 2>&1"
    with ray_cluster(site, folder, placer, **result) as cluster:
        yield cluster


def placement_state(site: Site, run_id: int) -> str:
    """Return the latest state of a run's first placement."""
    with site.database.reading() as session:
        return session.get_one(Placement, (run_id, 1)).state


def why(site: Site, run_id: int) -> str:
    """Return the pending reason of a queued run."""
    with site.database.reading() as session:
        return pending_reasons.reason(
            runs.get(session, run_id), pending_reasons.Queue.read(session)
        ).text
