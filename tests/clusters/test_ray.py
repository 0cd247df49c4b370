"""Pilots by a real Ray: a head and two nodes, each a machine of its own."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from db import runs, waiting
from db.settings import Settings
from db.tables import Status
from tests.clusters.machines import can_make_machines
from tests.clusters.rays import Cluster, ray_cluster
from tests.site import GATED, Site, until
from worker.placement import Pilots
from worker.ray import Ray

pytestmark = [
    pytest.mark.only_on("postgresql"),
    pytest.mark.skipif(not can_make_machines(), reason="needs root and iproute2"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`"),
]
STEPS = 80


@pytest.fixture
def cluster(site: Site, tmp_path: Path) -> Iterator[Cluster]:
    with ray_cluster(site, tmp_path) as made:
        yield made


def settings(site: Site, cluster: Cluster) -> Settings:
    return Settings(
        data=site.data, placement="ray", ray_address=cluster.address, ray_resource="CPU"
    )


@pytest.fixture
def engine(site: Site, cluster: Cluster) -> Iterator[Ray]:
    with closing(Ray(settings(site, cluster))) as made:
        until(lambda: _is_up(made))
        yield made


def _is_up(engine: Ray) -> bool:
    try:
        return engine.look(Pilots(0, 0, 1, 1)).state == "gone"
    except OSError:
        return False


@dataclass(frozen=True)
class Sleepers(Pilots):
    """Pilots that only tell of themselves, and sleep."""

    @property
    def command(self) -> list[str]:
        told = "$HALFSTEP_WORKER_NAME on $(hostname), threads ${OMP_NUM_THREADS-any}"
        return ["sh", "-c", f"echo {told}, $(cat /proc/self/oom_score_adj); exec sleep 1000"]


def test_actors_are_placed_once_seen_and_cancelled(engine: Ray) -> None:
    """However often it is asked; what there is no room for waits as a whole, with the reason; an
    actor whose worker cannot be started says so; and no node says less than it lacks.
    """
    first, second, large = Sleepers(1, 1, 2, 1), Sleepers(2, 1, 2, 1), Sleepers(3, 1, 3, 1)
    assert engine.look(first).state == "gone"
    engine.place(first)
    engine.place(first)
    until(lambda: engine.look(first).state == "running")
    until(lambda: engine.log(first).count("halfstep-1-1-") == 2)
    assert sorted(engine.log(first).splitlines()) == [
        "halfstep-1-1-0 on m1, threads any, 0",
        "halfstep-1-1-1 on m2, threads any, 0",
    ]
    engine.place(second)
    until(lambda: "0 of 2 CPU are free" in engine.look(second).reason)
    assert engine.look(second).state == "waiting"
    engine.place(large)
    assert "3 x 1 CPU" in engine.look(large).reason
    assert "and 2 of its nodes have as many" in engine.look(large).reason
    for each in (first, second, large):
        engine.cancel(each)
        engine.cancel(each)
        until(lambda: engine.look(each).state == "gone")  # noqa: B023
    said = "\n".join(map(str, engine.check()))
    assert "answers; CPU of its nodes: 1, 1" in said
    assert "ok  on a node, database: postgresql" in said
    assert "ok  on a node, interface: other nodes reach this machine at 10.213.77.1" in said


def test_a_run_trains_where_ray_has_room_and_outlives_its_head(
    site: Site, cluster: Cluster
) -> None:
    """On two nodes; another waits with Ray's reason, and leaves Ray when it is cancelled. The head
    is lost, and a minute later all of Ray: the run ends in its first attempt. A second run waits.
    """
    with placing(site, cluster):
        run_id, second = (site.submit(STEPS, recipe="gated", nodes=2) for _ in range(2))
        site.wait_for_step(run_id, 3)
        until(lambda: "0 of 2 CPU are free" in why(site, second))
        with site.database.writing() as session:
            runs.cancel(session, second, site.owner)
        cluster.head.switch_off()
        until(lambda: not raylets(cluster))
        site.wait_for_step(run_id, site.run(run_id).step + 5)
        site.open_gate()
        run = site.wait(run_id)
    assert (run.status, run.attempt) == (Status.FINISHED, 1)
    assert site.count_steps(run_id) == STEPS


@contextmanager
def placing(site: Site, cluster: Cluster) -> Iterator[None]:
    """Run a placer outside of the cluster, once it offers the gated recipe."""
    own = {**site.environment, "HALFSTEP_PLACEMENT": "ray", "HALFSTEP_RAY_RESOURCE": "CPU"}
    own |= {"HALFSTEP_RAY_ADDRESS": cluster.address, "HALFSTEP_WORKER_NAME": "placer"}
    own |= {"HALFSTEP_RECIPES": GATED, "HALFSTEP_GATE": str(site.gate)}
    command = [sys.executable, "-m", "worker.placer"]
    with subprocess.Popen(command, env={**os.environ, **own}) as placer:
        try:
            until(lambda: site.offers("gated"))
            yield
        finally:
            placer.terminate()


def raylets(cluster: Cluster) -> list[psutil.Process]:
    """List what is left of Ray on its nodes."""
    words = {f"--node_ip_address={node.address}" for node in cluster.nodes}
    return [
        each for each in psutil.process_iter(["cmdline"]) if words & {*(each.info["cmdline"] or ())}
    ]


def why(site: Site, run_id: int) -> str:
    """What a queued run waits for."""
    with site.database.reading() as session:
        return waiting.reason(runs.get(session, run_id), waiting.Queue.read(session))
