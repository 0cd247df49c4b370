"""Three machines, and one run over two of them that suffers each fault repeatedly."""

import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sqlalchemy import make_url

from db.files import checkpoints
from db.files.object_store import get_file, open_store
from db.runs import runs
from db.settings import Settings
from db.tables import Status
from tests.buckets import Bucket, moto
from tests.clusters.machines import LEASE_SECONDS, NET, Machine, can_make_machines, machines
from tests.clusters.machines_made import assert_never_two_at_once, worker_of
from tests.conftest import postgresql_control
from tests.faults.clocks_made import HOUR, fake_clock, jump
from tests.faults.conftest import COUNTS, often
from tests.site import Site, until
from tests.trainer.conftest import assert_same_bits

pytestmark = [
    pytest.mark.only_on("postgresql"),
    pytest.mark.skipif(not can_make_machines(), reason="needs root and iproute2"),
]
ROUNDS = often(full=30, short=2)
MOST_STEPS_BETWEEN = 12
#: While the gate is shut, at five a second, no fault takes as many.
STEPS = ROUNDS * 200
MODERATE = {"HALFSTEP_TEST_STEP_SECONDS": "0.2", "HALFSTEP_MAX_ATTEMPTS": "1000"}


class Scene:
    """The machines, the run on two of them, and its bucket of checkpoints."""

    def __init__(self, site: Site, three: list[Machine], folder: Path, bucket: Bucket) -> None:
        self.site, self.three, self.folder, self.bucket = site, three, folder, bucket
        self.run_id = 0
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")  # so that a failure can be looked into
        self.moments = random.Random(seed)

    def start(self, machine: Machine) -> None:
        offset = self.folder / f"offset-{machine.name}"
        jump(offset, 0)
        machine.start(**MODERATE, **self.bucket.environment, **fake_clock(offset))

    def submit(self) -> int:
        config: dict[str, Any] = {"precision": "fp16", "checkpoints": {"every_steps": 5}}
        config["training"] = {"steps": STEPS, "batch_size": 16}
        return self.site.submit(recipe="gated", nodes=2, config=config)

    def victim(self, number: int) -> Machine:
        """Return the machine of the run's node `number`."""
        name = worker_of(self.site, self.run_id, number)
        return next(each for each in self.three if each.name == name)

    def wait_for_another_attempt(self, before: int) -> None:
        run = self.site.run
        until(lambda: run(self.run_id).attempt > before)
        until(lambda: run(self.run_id).status == Status.RUNNING)

    def end(self, run_id: int) -> dict[str, Any]:
        """Return a run's last checkpoint."""
        with self.site.database.reading() as session:
            saved = checkpoints.to_resume(session, runs.get(session, run_id))[0]
        settings = Settings(data=self.folder / "other", storage_url=self.bucket.url)
        path = self.folder / "copy"
        get_file(open_store(settings), saved.key, path, sha256=saved.sha256)
        state: dict[str, Any] = torch.load(path, weights_only=True)
        path.unlink()
        return state


Fault = Callable[[Scene, Machine], None]


def node_killed(scene: Scene, machine: Machine) -> None:
    before = scene.site.run(scene.run_id).attempt
    machine.switch_off()
    scene.wait_for_another_attempt(before)
    scene.start(machine)


def supervisor_killed(scene: Scene, machine: Machine) -> None:
    _kill(scene, machine, "worker.attempts.supervisor")


def rank_killed(scene: Scene, machine: Machine) -> None:
    _kill(scene, machine, "trainer.process")


def link_cut_for_longer_than_the_lease(scene: Scene, machine: Machine) -> None:
    before = scene.site.run(scene.run_id).attempt
    machine.cut()
    scene.wait_for_another_attempt(before)
    machine.mend()


def link_cut_for_a_moment(scene: Scene, machine: Machine) -> None:
    before = scene.site.run(scene.run_id)
    machine.cut()
    time.sleep(LEASE_SECONDS / 8)
    machine.mend()
    scene.site.wait_for_step(scene.run_id, before.step + 1)
    assert scene.site.run(scene.run_id).attempt == before.attempt


def clock_jumped(scene: Scene, machine: Machine) -> None:
    before = scene.site.run(scene.run_id)
    jump(scene.folder / f"offset-{machine.name}", scene.moments.choice([-1, 1]) * HOUR)
    scene.site.wait_for_step(scene.run_id, before.step + 5)
    assert scene.site.run(scene.run_id).attempt == before.attempt


def database_stopped(scene: Scene, _machine: Machine) -> None:
    folder = Path(str(make_url(scene.site.url).query["host"]))
    postgresql_control(folder, "stop", "-m", "immediate")
    time.sleep(30)
    postgresql_control(folder, "start")
    until(scene.site.reaches_database)
    step = scene.site.run(scene.run_id).step
    scene.site.wait_for_step(scene.run_id, step + 5)


def bucket_away(scene: Scene, _machine: Machine) -> None:
    """Let the bucket fail during three checkpoints, which arrive afterwards."""
    before = scene.site.run(scene.run_id)
    scene.bucket.proxy.is_broken = True
    scene.site.wait_for_step(scene.run_id, before.step + 15)
    scene.bucket.proxy.is_broken = False
    until(lambda: _newest_checkpoint(scene) > before.step)
    assert scene.site.run(scene.run_id).attempt == before.attempt


FAULTS: list[Fault] = [
    *(node_killed, supervisor_killed, rank_killed),
    *(link_cut_for_longer_than_the_lease, link_cut_for_a_moment),
    *(clock_jumped, database_stopped, bucket_away),
]
CHANGE_NO_ATTEMPT: list[Fault] = [link_cut_for_a_moment, clock_jumped, bucket_away]


@pytest.fixture
def scene(site: Site, tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        three = stack.enter_context(machines(site, tmp_path, 3))
        port = stack.enter_context(moto(tmp_path))
        bucket = Bucket(port, f"test-{uuid.uuid4()}", host=f"{NET}.1")
        stack.callback(bucket.proxy.close)
        for name, value in bucket.environment.items():
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(name, value)
        yield Scene(site, three, tmp_path, bucket)


@pytest.mark.parametrize(
    "failure_kind", FAULTS, ids=lambda failure_kind: str(failure_kind.__name__)
)
def test_a_run_over_two_machines_survives_it_again_and_again(
    scene: Scene, failure_kind: Fault
) -> None:
    """Two attempts never train at once, all rows are recorded, and the end is bit-identical."""
    site = scene.site
    for machine in scene.three:
        scene.start(machine)
    until(lambda: site.offers("gated"))
    scene.run_id = scene.submit()
    site.wait_for_step(scene.run_id, 1)
    for _ in range(ROUNDS):
        so_far = site.run(scene.run_id).step
        site.wait_for_step(scene.run_id, so_far + scene.moments.randint(1, MOST_STEPS_BETWEEN))
        until(lambda: site.run(scene.run_id).status == Status.RUNNING)
        failure_kind(scene, scene.victim(scene.moments.randint(0, 1)))
    site.open_gate()
    run = site.wait(scene.run_id)
    assert (run.status, site.count_steps(run.id)) == (Status.FINISHED, STEPS), run.error
    whole = scene.submit()
    assert site.wait(whole).status == Status.FINISHED
    ours, theirs = scene.end(run.id), scene.end(whole)
    for part in ("modules", "optimizers", "scaler", "random"):
        assert_same_bits(ours[part], theirs[part])
    if failure_kind in CHANGE_NO_ATTEMPT:
        assert run.attempt == 1
    else:
        assert run.attempt > 1
        assert_never_two_at_once(site, run.id)
    COUNTS.append(f"{failure_kind.__name__}: {ROUNDS} times, {run.attempt} attempts, bit-identical")


def _kill(scene: Scene, machine: Machine, module: str) -> None:
    """Kill a process of a machine, and wait for the next attempt."""
    before = scene.site.run(scene.run_id).attempt
    until(lambda: bool(_processes(machine, module)))
    os.kill(_processes(machine, module)[0], signal.SIGKILL)
    scene.wait_for_another_attempt(before)


def _processes(machine: Machine, module: str) -> list[int]:
    """Return the machine's live processes that run a module."""
    assert machine.process is not None
    found = []
    for each in psutil.Process(machine.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it ends meanwhile
            found += [each.pid] if module in each.cmdline() else []
    return found


def _newest_checkpoint(scene: Scene) -> int:
    with scene.site.database.reading() as session:
        return max((row.step for row in checkpoints.of_run(session, scene.run_id)), default=0)
