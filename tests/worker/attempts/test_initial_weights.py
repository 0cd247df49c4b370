"""Initial weights of runs: files of the admin, and those of other runs."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from db.files import artifacts, checkpoints, uploads
from db.settings import Settings
from tests.site import Site
from worker.attempts.attempt import CannotStart
from worker.attempts.initial_weights import resolve


def test_weights_are_in_allowed_folders(tmp_path: Path) -> None:
    """Weights outside of the allowed folders are rejected, without revealing whether they exist."""
    models, other = tmp_path / "models", tmp_path / "other"
    for folder in (models, other):
        folder.mkdir()
        (folder / "net.pt").touch()
    (models / "out.pt").symlink_to(other / "net.pt")
    (models / "in.pt").symlink_to(models / "net.pt")
    (tmp_path / "models-2").mkdir()
    settings = Settings(data=tmp_path, weights_dirs=f" {models}, {tmp_path / 'more'}")
    for name in ("net.pt", "in.pt", "../models/net.pt"):
        assert resolve(f"{models}/{name}", settings) == models / "net.pt"
    assert resolve(str(models), settings) == models
    for path in (
        f"{models}/../other/net.pt",
        f"{models}/out.pt",
        f"{other}/gone.pt",
        "/etc/passwd",
    ):
        with pytest.raises(CannotStart, match=f"{path}; allowed: paths below {models}, "):
            resolve(path, settings)
    with pytest.raises(CannotStart, match="allowed: paths below"):
        resolve(f"{tmp_path}/models-2", settings)
    with pytest.raises(CannotStart, match="which does not exist on this worker"):
        resolve(f"{models}/gone.pt", settings)
    with pytest.raises(CannotStart, match="null"):
        resolve(f"{models}/a\0.pt", settings)


def test_without_allowed_folders_no_path_is(tmp_path: Path) -> None:
    """Without allowed folders a path is rejected, and the message names the admin's setting."""
    with pytest.raises(CannotStart, match="set HALFSTEP_WEIGHTS_DIRS on the worker"):
        resolve(str(tmp_path), Settings(data=tmp_path))


def test_runs_start_from_weights_only(site: Site, tmp_path: Path) -> None:
    """A run starts from weights of another run, a file or an upload; it fails if they do not
    fit.
    """
    models = tmp_path / "models"
    models.mkdir()
    save_file({"no.such": torch.ones(1)}, models / "net.safetensors")
    first = site.submit(steps=2)

    def start(**weights: object) -> int:
        config = {"precision": "fp16", "training": {"steps": 2}, "weights": weights}
        return site.submit(config=config)

    with site.worker(HALFSTEP_WEIGHTS_DIRS=str(models)):
        site.wait(first)
        second = start(run=first, step=2)
        unlike = start(path=str(models / "net.safetensors"))
        outside = start(path="/etc/passwd")
        gone = start(run=first, step=1)
        uploaded = start(upload=upload(site, first))
        absent = start(upload=f"{'0' * 64}/net.pt")
        all_of_them = (second, unlike, outside, gone, uploaded, absent)
        ended = {run_id: site.wait(run_id) for run_id in all_of_them}
    assert [ended[run_id].status for run_id in (second, uploaded)] == ["finished"] * 2
    with site.database.reading() as session:
        [result] = artifacts.diagnoses(session, second, "weights")
        [told_of_upload] = artifacts.diagnoses(session, uploaded, "weights")
        [refused] = artifacts.diagnoses(session, unlike, "weights")
        [row] = checkpoints.weights_at(session, first, 2)
    assert (result.content["loaded"], result.content["missing"]) == (6, [])
    assert result.content["source"] == f"run {first} at step 2"
    assert (told_of_upload.content["loaded"], told_of_upload.content["missing"]) == (6, [])
    assert told_of_upload.content["source"].startswith("net.safetensors, uploaded, SHA-256 ")
    assert refused.content["unexpected"] == ["no.such"]
    for run_id, message in (
        (unlike, "no weight of"),
        (outside, "weights.path is /etc/passwd; allowed: paths below"),
        (absent, "the uploaded weights net.pt that it was to start from are missing or damaged"),
        (gone, f"the weights of run {first} at step 1 no longer exist"),
    ):
        assert ended[run_id].status == "failed"
        assert message in (ended[run_id].stop_reason or "") + (ended[run_id].error or "")
    assert (site.data / row.key).is_file()


def upload(site: Site, run_id: int) -> str:
    """Put a run's weights into the folder of uploads; return their name in configurations."""
    with site.database.reading() as session:
        [row] = checkpoints.weights_at(session, run_id, None)
    name = f"{row.sha256}/net.safetensors"
    place = site.data / uploads.key(name)
    place.parent.mkdir(parents=True)
    shutil.copy(site.data / row.key, place)
    return name


def test_weights_are_not_in_folders_that_runs_write(tmp_path: Path) -> None:
    """Weights in a folder that a run can write are rejected, since it could become a link."""
    (tmp_path / "out" / "models").mkdir(parents=True)
    (tmp_path / "out" / "models" / "net.pt").touch()
    settings = Settings(weights_dirs=f"{tmp_path}/out/models", write_roots=str(tmp_path / "out"))
    with pytest.raises(CannotStart, match="allows no folder"):
        resolve(str(tmp_path / "out" / "models" / "net.pt"), settings)
