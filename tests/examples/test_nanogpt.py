"""The nanoGPT-like example as a queued run."""

import shutil
from pathlib import Path

import pytest

from db.files import artifacts, checkpoints
from db.tables import Status
from tests.db.conftest import submit_command
from tests.site import Site

EXAMPLE = Path(__file__).parents[2] / "examples" / "nanogpt.py"


@pytest.mark.only_on("sqlite")
def test_nanogpt_trains_through_the_queue(site: Site, tmp_path: Path) -> None:
    """Losses fall, and the run has the script's skips, checkpoint and progress."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(EXAMPLE, project / "train.py")
    line = "python train.py --steps {steps} --lr {lr} --scale {scale}"
    config = {"steps": 40, "lr": 0.01, "scale": 2.0**28}
    with site.database.writing() as session:
        run_id = submit_command(session, site.owner, line, folder=str(project), config=config).id
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        run = site.wait(run_id)
    assert (run.status, run.step, run.precision) == (Status.FINISHED, 40, "fp16"), run.error
    assert 3 <= run.skipped < 20
    assert run.loss is not None
    assert run.loss < 4.6  # the logarithm of some hundred characters
    assert "step 39: loss" in site.log(run_id)
    with site.database.reading() as session:
        [file] = checkpoints.of_run(session, run_id)
        assert not artifacts.diagnoses(session, run_id, "schedule")  # it waits for the weights
    assert (site.data / file.key).read_bytes() == (project / "nanogpt.pt").read_bytes()
