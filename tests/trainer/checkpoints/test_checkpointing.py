"""A save interrupts neither training nor earlier saves, however it ends."""

import errno
import os
import re
import signal
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch

from halfstep.run_config import parse_config
from tests import warm
from tests.spool_made import fields_of
from tests.trainer.conftest import CPU, Pair, Regression, assert_same_bits
from tests.trainer.process_made import write_job
from trainer.checkpoints import checkpoint
from trainer.checkpoints.files import checksum, write_whole
from trainer.checkpoints.weights import write_weights
from trainer.distributed.ranks import Control
from trainer.loop import train
from trainer.setup import prepare_run

EVERY_5 = {"training": {"steps": 20}, "checkpoints": {"every_steps": 5}}


@pytest.fixture
def disk(monkeypatch):
    """An event that ends a slow disk: until it is set, nothing is synced."""
    ready, fsync = Event(), os.fsync

    def slow(descriptor):
        assert ready.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    return ready


def test_the_saved_state_is_that_of_the_step_boundary(run_loop, tmp_path, disk):
    """A save has the step boundary's weights, moments, scaler and counts, though steps continue."""
    kept = {}

    class Observed(Pair):
        def __init__(self, config, device):
            super().__init__(config, device)
            kept["recipe"] = self

    asked = []

    def control():
        """Call at each step boundary; at the ninth the disk works again."""
        asked.append(1)
        recipe = kept["recipe"]
        if len(asked) == 5:
            kept["modules"] = deepcopy({n: m.state_dict() for n, m in recipe.modules.items()})
            kept["optimizers"] = {
                name: deepcopy(each.state_dict()) for name, each in recipe.optimizers.items()
            }
            kept["scaler"] = recipe.scaler.state_dict()
        if len(asked) == 9:
            assert list(tmp_path.glob("*.pt")) == []  # step 5's is still being written
            disk.set()
        return Control()

    run = run_loop(Observed, EVERY_5, folder=tmp_path, control=control)
    saved = checkpoint.load(tmp_path / "step-00000005.pt")
    assert saved["progress"]["step"] == 5
    for part in ("modules", "optimizers", "scaler"):
        assert_same_bits(saved[part], kept[part])
    weights = run.weights()
    assert not all(
        (saved["modules"]["model"][name] == weights[f"model.{name}"]).all()
        for name in saved["modules"]["model"]
    )
    assert [event["step"] for event in run.of("checkpoint")] == [5, 10, 15, 20]


def test_a_run_that_raises_finishes_its_save(run_loop, tmp_path, disk):
    """A run that raises completes its earlier save, with its event."""

    class Failing(Regression):
        drawn = 0

        def batch(self, indices, generator):
            self.drawn += 1
            if self.drawn == 8:
                disk.set()
                raise ZeroDivisionError
            return super().batch(indices, generator)

    result = []
    with pytest.raises(ZeroDivisionError):
        train(
            prepare_run(
                Failing,
                parse_config(Failing, EVERY_5),
                device=CPU,
                on_steps=lambda steps: None,
                on_event=lambda event: result.append(fields_of(event)),
                checkpoint_folder=tmp_path,
            )
        )
    assert checkpoint.load(tmp_path / "step-00000005.pt")["progress"]["step"] == 5
    assert [event["step"] for event in result if event["event"] == "checkpoint"] == [5]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("steps", [40, 100_000], ids=["at the end", "at a step boundary"])
def test_a_full_disk_fails_the_run(run_loop, tmp_path, steps, suffix):
    """A full disk fails the run with the system's message; earlier checkpoints are complete, and
    no partial file is left.
    """
    (tmp_path / f".step-00000040.{suffix}.partial").symlink_to("/dev/full")
    values = {"training": {"steps": steps}, "checkpoints": {"every_steps": 20}}
    boundaries = []
    with pytest.raises(OSError, match="No space left on device") as raised:
        run_loop(
            Regression,
            values,
            folder=tmp_path,
            control=lambda: boundaries.append(1) or Control(),
        )
    assert raised.value.errno == errno.ENOSPC
    assert 40 <= len(boundaries) <= 60  # the save of step 60 would wait for that of 40
    assert checkpoint.load(tmp_path / "step-00000020.pt")["progress"]["step"] == 20
    assert list(tmp_path.glob(".*")) == list(tmp_path.glob("step-00000040.safetensors")) == []


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_keeps_the_one_before(tmp_path):
    """A SIGKILL during the second file's write leaves the first whole and no second one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    config = {"training": {"steps": 10**6}, "checkpoints": {"every_steps": 10}}
    write_job(tmp_path, config=config)
    # A pipe for a file: the write goes on as far as we read it, and training as far as it likes.
    pipe = folder / ".step-00000020.pt.partial"
    os.mkfifo(pipe)
    training = warm.Popen(
        [sys.executable, "-m", "trainer.process", str(tmp_path), "1"],
        env=os.environ | {"HALFSTEP_PARENT_PID": str(os.getpid())},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    with pipe.open("rb") as file:
        assert file.read(100).startswith(b"PK")
        training.send_signal(signal.SIGKILL)
        training.wait(60)
    whole = sorted(path.name for path in folder.iterdir() if path != pipe)
    assert whole == ["step-00000010.pt", "step-00000010.safetensors"]
    assert checkpoint.load(folder / "step-00000010.pt")["progress"]["step"] == 10


def bytes_read():
    """Return the number of bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.slow
def test_saved_files_are_hashed_without_reading_them(run_loop, tmp_path):
    """Saved files are hashed while they are written, without reading them."""
    before = []

    class Large(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["model"].register_buffer("large", torch.ones(2**22))  # 16 MiB

        def training_step(self, batch):
            if saved := sorted(tmp_path.glob("step-*.safetensors")):
                before.append((len(saved), bytes_read()))  # what a save imports is imported
            yield from super().training_step(batch)

    values = {"training": {"steps": 4}, "checkpoints": {"every_steps": 1}}
    run = run_loop(Large, values, folder=tmp_path)
    after = bytes_read()
    saved_before, read_before = before[0]
    written = [sum(file["size_bytes"] for file in each["files"]) for each in run.of("checkpoint")]
    assert sum(written[saved_before:]) >= 2 * 2**25
    assert after - read_before < 2**20
    checksum(tmp_path / "step-00000004.pt")
    assert bytes_read() - after >= 2**24


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("name", ["state.pt", "weights.safetensors"])
def test_a_full_disk_names_folder_and_sizes(small_disk, name):
    """On a full disk the error has the folder and the needed and free bytes, not torch's text."""
    state = {"weight": torch.zeros(3 * 2**20)}  # 12 MiB, in the middle of which it is full
    write = partial(torch.save, state)
    if name.endswith("safetensors"):
        write = partial(write_weights, state)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_whole(small_disk / name, write)
    assert raised.value.errno == errno.ENOSPC
    said = re.search(
        rf"in {small_disk}: {name} needs ([\d,]+) bytes, ([\d,]+) are free", str(raised.value)
    )
    needed, free = (int(each.replace(",", "")) for each in said.groups())
    assert 12 * 2**20 < needed < 13 * 2**20
    assert 3 * 2**20 < free <= 4 * 2**20
    assert list(small_disk.iterdir()) == []
