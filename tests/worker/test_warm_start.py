"""Trainings forked from a warm process equal fresh ones, and end with their lease."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from db.queue import workers
from db.settings import Settings
from db.tables import Status
from tests.faults.sameness import assert_same, config
from tests.marks import extended
from tests.site import Site, is_running, until
from worker.warm_start import differs_early, environment

DESCRIBED = f"{Path(__file__).parents[1] / 'trainer' / 'described.py'}:Described"
WARM, COLD = {"HALFSTEP_WARM_START": "yes"}, {"HALFSTEP_WARM_START": "no"}

pytestmark = [pytest.mark.slow, pytest.mark.only_on("sqlite")]


def warm_process(site: Site, run_id: int) -> psutil.Process:
    """Return the process that forked a training, which is no child of its supervisor."""
    parent = site.training(run_id).parent()
    assert parent is not None
    assert parent.pid != supervisor(site, run_id).pid
    return parent


def supervisor(site: Site, run_id: int) -> psutil.Process:
    return psutil.Process(site.supervisor_pid(run_id, site.run(run_id).attempt))


def test_a_warm_start_trains_to_the_same_bits(site: Site) -> None:
    """A warm start's weights, states and records equal a fresh process's."""
    runs = []
    for start in (WARM, COLD):
        site.gate.unlink(missing_ok=True)
        with site.start_gated_worker(**start):
            runs.append(run_id := site.submit(recipe="gated", config=config(150)))
            site.wait_for_step(run_id, 1)
            parent = site.training(run_id).parent()
            assert (parent == supervisor(site, run_id)) == (start is COLD)
            site.open_gate()
            site.wait(run_id)
    assert_same(site, *runs)


def test_the_first_run_after_an_offer_is_forked(site: Site) -> None:
    """A run submitted before the warm process has loaded is forked once it has."""
    with site.start_gated_worker(**WARM):
        until(lambda: site.offers("gated"))
        run_id = site.submit(recipe="gated", steps=200)
        site.wait_for_step(run_id, 1)
        warm = warm_process(site, run_id)
        until(lambda: memory(site) is not None)
        info = warm.memory_full_info()
        assert info.pss / 2 < memory(site) <= info.rss
        site.open_gate()
        assert site.wait(run_id).attempt == 1


def memory(site: Site) -> int | None:
    """Return the warm process's memory, as the worker reports it."""
    with site.database.reading() as session:
        return workers.get(session, 1).warm_memory_bytes


@pytest.mark.parametrize("sandbox", ["yes", *extended(["no"])])
def test_a_warm_process_is_isolated_like_a_fresh_one(
    site: Site, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked training has the same environment, files, privileges and signals as a fresh one."""
    offered = {"HALFSTEP_RECIPES": DESCRIBED, "HALFSTEP_SANDBOX": sandbox}
    monkeypatch.setenv("HALFSTEP_COLD", "yes")  # or fresh ones would be forked, too
    private = site.data / "secrets.key"
    private.write_text("key")
    tried = [private, site.data / "halfstep.db", Path("/etc/shadow"), Path(__file__)]
    offered["HALFSTEP_TEST_TRIED"] = ":".join(map(str, tried))
    described = []
    with site.worker(**offered, **WARM) as worker:
        for _start in ("forked", "as a program"):
            run_id = site.submit(recipe="described", steps=2)
            assert site.wait(run_id).status == Status.FINISHED, site.log(run_id)
            described.append(description(site, run_id))
            [process] = [
                each
                for each in psutil.Process(worker.pid).children()
                if "trainer.warm_process" in each.cmdline()
            ]
            process.suspend()  # it forks no more
        process.resume()
    logs = [site.data / "runs" / f"{run}" / "supervisor-1.log" for run in (1, 2)]
    assert ["starts as a program" in log.read_text() for log in logs] == [False, True]
    warm, cold = described
    for name, value in cold.items():
        assert warm[name] == value, name
    is_private = all(word.endswith("Error") for word in warm["tried"][str(private)].split())
    assert is_private == (sandbox == "yes")


def description(site: Site, run_id: int) -> dict[str, Any]:
    """Return the output of DESCRIBED, with the run's number replaced."""
    lines = (
        site.log(run_id)
        .replace(f"/runs/{run_id}", "/runs/N")
        .replace(f"/scratch/{run_id}/", "/scratch/N/")
        .splitlines()
    )
    begin = "DESCRIBED "
    return dict(json.loads(each.removeprefix(begin)) for each in lines if each.startswith(begin))


def test_a_recipe_file_is_loaded_in_its_own_process_only(site: Site) -> None:
    """A changed recipe file is loaded again, and one that breaks its process breaks no other."""
    file = site.data.parent / "mine.py"
    code = (
        "import os, sys\n"
        "from trainer.recipes.digits import Digits\n"
        "class Mine(Digits):\n"
        "    name = 'mine'\n"
        "if sys.argv[0] == 'trainer.process':\n"
        "    print('loaded', {}, flush=True)\n"
        "    {}\n"
    )
    file.write_text(code.format(1, "pass"))
    with site.worker(HALFSTEP_RECIPES=f"{file}:Mine", **WARM):
        first = site.submit(recipe="mine", steps=2)
        assert site.wait(first).status == Status.FINISHED
        file.write_text(code.format(2, "os._exit(9)"))
        second = site.submit(recipe="mine", steps=2)
        assert site.wait(second).status == Status.FAILED
        third = site.submit(steps=2)
        assert site.wait(third).status == Status.FINISHED
    assert "loaded 1" in site.log(first)
    assert "loaded 2" in site.log(second)


def test_a_killed_warm_process_is_replaced(site: Site) -> None:
    """If the warm process is killed, its training ends and the run continues from another."""
    with site.start_gated_worker(**WARM) as worker:
        run_id = site.submit(recipe="gated", config=config(150))
        site.wait_for_step(run_id, 1)
        training, warm = site.training(run_id), warm_process(site, run_id)
        before = living_children(worker.pid)
        warm.kill()
        until(lambda: not is_running(training))
        until(lambda: site.run(run_id).attempt == 2)
        until(lambda: site.has_training(run_id))
        assert site.training(run_id) != training
        site.open_gate()
        assert site.wait(run_id).status == Status.FINISHED
        until(lambda: len(living_children(worker.pid) - before) == 1)


def living_children(pid: int) -> set[psutil.Process]:
    return {each for each in psutil.Process(pid).children() if is_running(each)}


def test_a_killed_server_of_supervisors_ends_none(site: Site) -> None:
    """If the supervisors' fork server is killed, they continue, and the next starts as a
    program.
    """
    with site.start_gated_worker(**WARM) as worker:
        first = site.submit(recipe="gated", config=config(150))
        site.wait_for_step(first, 1)
        server = supervisor(site, first).parent()
        assert server is not None
        assert server.ppid() == worker.pid
        server.kill()
        until(lambda: not is_running(server))
        site.open_gate()
        assert site.wait(first).attempt == 1
        second = site.submit(recipe="gated", steps=2)
        assert site.wait(second).status == Status.FINISHED


def test_a_killed_worker_leaves_its_trainings_alone(site: Site) -> None:
    """After a worker's kill supervisor and training continue; the warm process ends after them."""
    with site.start_gated_worker(**WARM) as worker:
        run_id = site.submit(recipe="gated", config=config(150))
        site.wait_for_step(run_id, 1)
        family = [site.training(run_id), supervisor(site, run_id)]
        warm = warm_process(site, run_id)
        worker.kill()
        worker.wait()
        with site.start_gated_worker(**WARM):
            step = site.run(run_id).step
            site.wait_for_step(run_id, step + 5)
            assert all(map(is_running, [*family, warm]))
            site.open_gate()
            assert site.wait(run_id).attempt == 1
            assert site.count_steps(run_id) == 150
            until(lambda: not is_running(warm))


@pytest.mark.extended
def test_a_warm_process_that_is_stopped_delays_a_start_only(site: Site) -> None:
    """While the warm process is stopped a training starts as a program, once."""
    with site.start_gated_worker(**WARM):
        first = site.submit(recipe="gated")
        site.wait_for_step(first, 1)
        warm = warm_process(site, first)
        site.open_gate()
        assert site.wait(first).status == Status.FINISHED
        warm.suspend()
        second = site.submit(recipe="gated", steps=2)
        assert site.wait(second).status == Status.FINISHED
        warm.resume()


def test_only_variables_that_are_read_late_may_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that changes an environment variable read at import is started as a program."""
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    settings = Settings(data=tmp_path)
    of_run = environment(settings) | {"TMPDIR": "/a", "HOME": "/b", "CUDA_VISIBLE_DEVICES": "1"}
    assert not differs_early(settings, of_run)
    for changed in ({"TORCH_LOGS": "inductor"}, {"OMP_NUM_THREADS": "2"}, {"MKL_NUM_THREADS": "2"}):
        assert differs_early(settings, of_run | changed) == set(changed)
    assert differs_early(settings, {k: v for k, v in of_run.items() if k != "TORCH_LOGS"})


def test_signals_to_everyone_do_not_end_a_warm_process(site: Site) -> None:
    """A warm process ignores signals that a service manager sends to all processes."""
    with site.start_gated_worker(**WARM) as worker:
        run_id = site.submit(recipe="gated", config=config(150))
        site.wait_for_step(run_id, 1)
        for process in psutil.Process(worker.pid).children(recursive=True):
            os.kill(process.pid, signal.SIGTERM)
        worker.terminate()
        worker.wait()
    assert site.run(run_id).status == Status.QUEUED
    assert site.run(run_id).step > 0
