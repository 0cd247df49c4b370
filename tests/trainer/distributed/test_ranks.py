import pytest
import torch
import torch.distributed as dist

from tests.trainer.conftest import assert_same_bits
from tests.trainer.process_made import run_ranks
from trainer.checkpoints import checkpoint
from trainer.distributed import ranks
from trainer.distributed.ranks import Control, ProcessGroup, Request

pytestmark = pytest.mark.slow


@pytest.fixture
def group():
    """A process group of one rank, which acts like several that agree."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroup()
    dist.destroy_process_group()


def test_ranks_agree_by_time_and_not_in_every_step(group, monkeypatch):
    """Ranks agree in every 200th step of a millisecond, and in each step of a second."""
    now = [0.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    asked = []

    def control():
        asked.append(now[0])
        return Control()

    for _ in range(1000):
        now[0] += 0.001
        group.agree(control)
    assert len(asked) <= 7
    asked.clear()
    for _ in range(400):
        now[0] += 1.0
        group.agree(control)
    assert len(asked) > 200


def test_a_request_waits_until_the_ranks_agree(group):
    """A request waits until all ranks can execute it."""
    waiting = [Control("pause", Request(7, "scale", 2.0))]
    taken = [
        each
        for _ in range(3000)
        if (each := group.agree(waiting.pop if waiting else Control)) != Control()
    ]
    assert taken == [Control("pause", Request(7, "scale", 2.0))]


SLOW_DISK = """
import os, sys, threading, time, torch
import torch.distributed as dist
import trainer.loop, trainer.setup
from datetime import timedelta
from pathlib import Path
from halfstep.run_config import parse_config
from tests.trainer.conftest import Regression
from trainer.checkpoints import state_files
from trainer.distributed.ranks import join

SECONDS = 5  # that the ranks wait for each other's gradients
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
save, gate = state_files.save, folder / "gate"

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def slow(*arguments):
    wait_for(gate)
    return save(*arguments)

def outlast():
    try:
        dist.barrier(group=impatient)  # to which the other rank does not come
    except RuntimeError:
        gate.touch()

class Saver(trainer.setup.Saver):
    def __exit__(self, *error):
        if rank == 1:
            threading.Thread(target=outlast).start()
        super().__exit__(*error)

(folder / f"here-{rank}").touch()
wait_for(folder / f"here-{1 - rank}")
state_files.save, trainer.setup.Saver = slow, Saver
with join(torch.device("cpu"), timeout_seconds=SECONDS) as (ranks, device):
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))
    prepared = trainer.setup.prepare_run(
        Regression, parse_config(Regression, {}), device=device, ranks=ranks,
        on_steps=lambda records: None, on_event=lambda event: None, checkpoint_folder=folder,
    )
    outcome = trainer.loop.train(prepared)
    torch.save(vars(outcome), folder / f"rank-{rank}.pt")
"""


@pytest.mark.extended
def test_a_save_may_take_longer_than_ranks_wait_for_each_other(tmp_path):
    """A save may take longer than the timeout of a process group; both ranks finish, and the
    checkpoint is whole.
    """
    run_ranks(tmp_path, SLOW_DISK)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert first == second == {"status": "finished", "step": 5}
    assert checkpoint.load(tmp_path / "step-00000005.pt")["progress"]["step"] == 5


REPLAYED = """
import sys, torch
import torch.distributed as dist
import trainer.loop
from torch import nn
from halfstep.run_config import parse_config
from halfstep.diagnosis.observations import EXPLAINING_SKIPS
from tests.trainer.conftest import Regression
from trainer.diagnosis import replay, step_repetition
from trainer.distributed.ranks import join
from trainer.loop import train
from trainer.setup import prepare_run

class Centred(nn.Module):
    # Takes away the mean over all ranks, and keeps a running one, as SyncBatchNorm does.
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(6))

    def forward(self, inputs):
        mean = inputs.detach().clamp(-3, 3).mean(0) / ranks.world_size
        dist.all_reduce(mean)
        self.running.lerp_(mean, 0.1)
        return inputs - mean

class Synchronised(Regression):
    defaults = {"training": {"steps": 100, "batch_size": 8}, "scaler": {"init_scale": 1024.0}}

    def __init__(self, config, device):
        super().__init__(config, device)
        self.train_size, self.inputs = 512, torch.randn(512, 6)
        self.inputs[7] = 1e6  # more than fp16 can hold, in one rank's batch of each epoch
        self.targets = self.inputs.clamp(-3, 3).sum(dim=1, keepdim=True)
        self.modules["model"].insert(0, Centred())
        kept.append(self)

class StepRepetition(step_repetition.StepRepetition):
    def repeat(self, step, *arguments, **options):
        steps.append(step.number)
        return super().repeat(step, *arguments, **options)

class Sanitizer(step_repetition.Sanitizer):
    def __init__(self, on_defects):
        self.kinds = set()
        def see(defects):
            self.kinds.update(defect.kind for defect in defects)
            on_defects(defects)
        super().__init__(see)

    def disarm(self):
        super().disarm()
        found.append(bool(self.kinds & EXPLAINING_SKIPS))

def run(replay_skips):
    config = parse_config(Synchronised, {"diagnosis": {"replay_skips": replay_skips}})
    train(prepare_run(Synchronised, config, device=device, ranks=ranks,
          on_steps=lambda records: None, on_event=lambda event: None))
    return [kept[-1].modules["model"].module.state_dict(), kept[-1].scaler.state_dict()]

replay.StepRepetition, step_repetition.Sanitizer = StepRepetition, Sanitizer
kept, steps, found = [], [], []
with join(torch.device("cpu"), timeout_seconds=60) as (ranks, device):
    ends = [run(replay_skips=3), run(replay_skips=0)]
    seen = {"ends": ends, "steps": steps, "found": found}
    torch.save(seen, f"{sys.argv[1]}/rank-{ranks.rank}.pt")
"""


def test_ranks_replay_the_same_steps(tmp_path):
    """If one rank overflows, all ranks replay the step, and the run's bits are unchanged."""
    run_ranks(tmp_path, REPLAYED)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert first["steps"] == second["steps"]
    assert len(first["steps"]) > 1
    assert all(one != other for one, other in zip(first["found"], second["found"], strict=True))
    assert_same_bits(first["ends"], second["ends"])
    assert_same_bits(*first["ends"])
