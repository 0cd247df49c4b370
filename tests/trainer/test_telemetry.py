import numpy as np
import pytest
import torch

from halfstep.config_groups import Diagnosis, Training
from halfstep.recording.ring import DRAIN_ROWS, RING_ROWS
from halfstep.telemetry.flags import UNKNOWN_NORM
from tests.trainer.conftest import CPU, Regression
from trainer.optimizers import StepResult, Update, watch_optimizers
from trainer.telemetry import Telemetry


class SlowEvent:
    """A CUDA event that completes after some polls."""

    def __init__(self, polls):
        self.polls, self.left, self.waits = polls, 0, 0

    def record(self, _stream):
        self.left = self.polls

    def query(self):
        self.left -= 1
        return self.left < 0

    def synchronize(self):
        self.left, self.waits = 0, self.waits + 1


@pytest.fixture
def linear():
    """Return a watched layer with SGD."""
    layer = torch.nn.Linear(2, 1)
    return watch_optimizers({"model": layer}, {"sgd": torch.optim.SGD(layer.parameters())})


def write(telemetry, step):
    """Write a row with its step's number as the loss."""
    one = torch.ones(())
    update = Update(one * 0, [one, one], one)
    telemetry.before_step(step)
    telemetry.after_step(StepResult(torch.tensor(float(step)), one, {"sgd": update}, {"sgd"}))
    telemetry.tick()


@pytest.mark.parametrize("polls", [0, 3, 10**6])
def test_rows_arrive_once_in_order_and_complete(linear, polls, monkeypatch):
    """Rows arrive once, complete and in order, over several rounds of the ring."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    received, event = [], SlowEvent(polls)
    telemetry = Telemetry(linear, CPU, Training(), Diagnosis(), received.append, [].append, 0.0)
    ring = telemetry.recorder.ring
    ring.readable, ring._arrived = None, event
    ring._pinned = torch.full_like(ring._ring, float("nan"))
    for step in range(1, 3 * RING_ROWS + 11):
        write(telemetry, step)
    telemetry.drain()
    records = np.concatenate(received)
    assert records["step"].tolist() == list(range(1, 3 * RING_ROWS + 11))
    assert records["loss"].tolist() == records["step"].tolist()
    if polls < RING_ROWS:
        assert event.waits <= 2  # waits of the final drain, since the loop itself never waited


def test_a_time_without_updates_is_short(linear, monkeypatch):
    """The first row is delivered at once, slow ones by time and fast ones by number."""
    now, received = [0.0], []
    monkeypatch.setattr("halfstep.recording.ring.clock", lambda: now[0])
    telemetry = Telemetry(linear, CPU, Training(), Diagnosis(), received.append, [].append, 0.0)
    for step in range(DRAIN_ROWS + 1):
        write(telemetry, step)
    assert [len(batch) for batch in received] == [1, DRAIN_ROWS]
    write(telemetry, DRAIN_ROWS + 1)
    now[0] = 0.4
    write(telemetry, DRAIN_ROWS + 2)
    assert [len(batch) for batch in received] == [1, DRAIN_ROWS, 2]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_norms_may_be_taken_rarely(run_loop, clip):
    """Norms are measured at an interval, or in each clip, without a change of the weights."""
    training = {"steps": 12, "batch_size": 8, "max_grad_norm": clip}
    values = {"precision": "fp16", "training": training}
    each = run_loop(Regression, values)
    few = run_loop(Regression, {**values, "diagnosis": {"norms_every_steps": 4}})
    is_taken = (few.records["step"] % 4 == 0) | (clip is not None)
    assert ((few.records["flags"] & UNKNOWN_NORM == 0) == is_taken).all()
    assert (few.records["grad_norm"][is_taken] == each.records["grad_norm"][is_taken]).all()
    assert np.isnan(few.records["grad_norm"][~is_taken]).all()
    assert few.records["loss"].tolist() == each.records["loss"].tolist()
