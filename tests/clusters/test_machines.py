"""Three machines and their failures: two attempts never train at once."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from db.tables import Status
from tests.clusters.machines import LEASE_SECONDS, Machine, can_make_machines, machines
from tests.clusters.machines_made import assert_never_two_at_once, worker_of
from tests.faults.conftest import COUNTS
from tests.site import Site, until
from tests.trainer.conftest import assert_same_bits

pytestmark = [
    pytest.mark.only_on("postgresql"),
    pytest.mark.skipif(not can_make_machines(), reason="needs root and iproute2"),
]
STEPS = 60


@pytest.fixture
def three(site: Site, tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(site, tmp_path, 3) as made:
        yield made


def kill_node(machine: Machine) -> None:
    machine.switch_off()


def cut_off(machine: Machine) -> None:
    machine.cut()


FAULTS: list[Callable[[Machine], None]] = [kill_node, cut_off]


@pytest.mark.parametrize("failure_kind", FAULTS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_lost_machine_costs_an_attempt_and_no_step(
    site: Site, three: list[Machine], failure_kind: Callable[[Machine], None], number: int
) -> None:
    """After a machine's loss another one takes its place, and the end is bit-identical."""
    config = {"precision": "fp16", "training": {"steps": STEPS, "batch_size": 16}}
    config["checkpoints"] = {"every_steps": 5}
    for machine in three:
        machine.start()
    until(lambda: site.offers("gated"))
    run_id = site.submit(recipe="gated", nodes=2, config=config)
    site.wait_for_step(run_id, 12)
    victim = next(each for each in three if each.name == worker_of(site, run_id, number))
    failure_kind(victim)
    until(lambda: site.run(run_id).attempt > 1 and site.run(run_id).status == Status.RUNNING)
    site.open_gate()
    victim.mend()
    assert site.wait(run_id).status == Status.FINISHED
    whole = site.submit(recipe="gated", nodes=2, config=config)
    if not victim.is_on:
        victim.start()
    assert site.wait(whole).status == Status.FINISHED
    ours, theirs = (end(site, each) for each in (run_id, whole))
    for part in ("modules", "optimizers", "scaler", "random"):
        assert_same_bits(ours[part], theirs[part])
    assert_never_two_at_once(site, run_id)
    COUNTS.append(f"{failure_kind.__name__} of node {number}: resumed, bit-identical")


def end(site: Site, run_id: int) -> dict[str, object]:
    path = site.data / "bucket" / "runs" / str(run_id) / "checkpoints" / f"step-{STEPS:08d}.pt"
    state: dict[str, object] = torch.load(path, weights_only=True)
    return state


def test_a_short_network_failure_costs_nothing(site: Site, three: list[Machine]) -> None:
    """If a link and the database are unreachable for an eighth of the lease each, attempt 1
    completes with all rows. (TCP retries after as long as it has waited.)
    """
    for machine in three[:2]:
        machine.start()
    until(lambda: site.offers("gated"))
    config = {"precision": "fp16", "training": {"steps": STEPS, "batch_size": 16}}
    run_id = site.submit(recipe="gated", nodes=2, config=config)
    site.wait_for_step(run_id, 5)
    three[1].cut()
    time.sleep(LEASE_SECONDS / 8)
    three[1].mend()
    site.wait_for_step(run_id, 15)
    for machine in three[:2]:  # from each other as well as from the database
        machine.cut()
    time.sleep(LEASE_SECONDS / 8)
    for machine in three[:2]:
        machine.mend()
    site.wait_for_step(run_id, 20)
    site.open_gate()
    run = site.wait(run_id)
    assert (run.status, run.attempt, run.killed_attempts) == (Status.FINISHED, 1, 0)
    assert site.count_steps(run_id) == STEPS
