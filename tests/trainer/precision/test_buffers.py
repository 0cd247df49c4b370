"""Running statistics that a skipped step made nonfinite are reported, and restored by a setting."""

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.telemetry.events import NonfiniteBuffers as NonfiniteBuffersEvent
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import STEP_DTYPE
from tests.spool_made import fields_of
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.checkpoints.resume import select_inherited_parts
from trainer.diagnosis.nonfinite_buffers import NonfiniteBuffers
from trainer.precision.buffers import BufferRule


class Shouting(nn.Module):
    """A module that overflows in fp16 at an interval, from some call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        factor = 60_000.0 if self.calls % 4 == 0 and x.dtype == torch.float16 else 1.0
        return x * factor * factor


class Ahead(Regression):
    """A recipe with an overflow before a BatchNorm, in fp16 by default."""

    defaults = {  # noqa: RUF012
        "training": {"steps": 10, "batch_size": 8},
        "scaler": {"init_scale": 64.0},
    }

    def __init__(self, config, device):
        super().__init__(config, device)
        model = nn.Sequential(nn.Linear(6, 8), Shouting(), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        model.register_buffer("nothing", torch.empty(0))
        self.modules = {"model": model}
        self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)}


RESTORED = {"scaler": {"init_scale": 64.0, "restore_buffers": True}}


def statistics(run):
    """Return the BatchNorm's buffers."""
    return dict(run.recipe.modules["model"][2].named_buffers())


def test_poisoned_buffers_are_named_once(run_loop):
    """Nonfinite buffers are named once with their first skip; sound ones are not."""
    run = run_loop(Ahead)
    assert run.list_skipped() == [4, 8]
    assert not statistics(run)["running_mean"].isfinite().all()
    assert run.of("poison") == [
        fields_of(make_reported(4, "model.2.running_mean", "model.2.running_var"))
    ]


def test_buffers_that_began_infinite_are_not_poisoned():
    """A buffer that is infinite by design, like a mask of -inf, is not reported."""
    module = nn.BatchNorm1d(3)
    module.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    poison, events = follow(module)
    poison.before_step(1)
    module.running_var[0] = torch.inf
    poison.drain()
    resumed, events_after = follow(module)
    resumed.load_state_dict(poison.state_dict())
    for each in (poison, resumed):
        each.before_step(2)
        each.receive(make_skipped_steps(2))
        each.drain()
    assert events == events_after == [make_reported(2, "model.running_var")]


def test_each_poisoned_buffer_is_reported_with_its_first_step(tmp_path):
    """Each poisoned buffer is reported once, also after a resume, and again after a rollback."""
    module = nn.BatchNorm1d(3)
    poison, events = follow(module)
    poison.before_step(1)
    poison.drain()
    before = poison.state_dict()
    module.running_var[0] = torch.inf
    poison.receive(make_skipped_steps(4))
    poison.drain()
    torch.save(poison.state_dict(), tmp_path / "state.pt")
    resumed, events_after = follow(module)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    module.running_mean[0] = torch.nan
    resumed.receive(make_skipped_steps(8))
    resumed.drain()
    assert events == [make_reported(4, "model.running_var")]
    assert events_after == [make_reported(8, "model.running_mean")]
    resumed.load_state_dict(before)
    resumed.receive(make_skipped_steps(6))
    resumed.drain()
    assert events_after[1:] == [make_reported(6, "model.running_mean", "model.running_var")]


def test_a_fork_reports_inherited_nonfinite_buffers():
    """A fork reports inherited nonfinite buffers at its own skip, with the parent's step."""
    module = nn.BatchNorm1d(3)
    poison, _events = follow(module)
    poison.before_step(1)
    module.running_var[0] = torch.inf
    poison.receive(make_skipped_steps(4))
    poison.drain()
    state = {"scaler": {"scale": 1.0}, "parts": {"poison": poison.state_dict()}}
    fork, events = follow(module)
    fork.load_state_dict(select_inherited_parts(state, is_scaled=True, is_fork=True)["poison"])
    fork.receive(make_skipped_steps(9))
    fork.drain()
    assert events == [make_reported(4, "model.running_var")]


def follow(module):
    """Return a module's observer, and the list of its reports."""
    events = []
    return NonfiniteBuffers({"model": module}, events.append), events


def make_reported(step, *buffers):
    """Return the event of these buffers."""
    return NonfiniteBuffersEvent(step=step, count=len(buffers), buffers=list(buffers))


def test_restored_buffers_are_those_before_the_skip(run_loop):
    """After a skip all buffers, counters too, are restored as if its batches were never seen."""
    run = run_loop(Ahead, RESTORED)
    assert run.list_skipped() == [4, 8]
    assert all(buffer.isfinite().all() for buffer in statistics(run).values())
    assert statistics(run)["num_batches_tracked"] == 8
    assert not run.of("poison")


def test_expanded_buffers_are_not_changed():
    """Expanded buffers, which cannot be written in place, are left as they are."""
    module = nn.BatchNorm1d(4)
    module.register_buffer("shared", torch.zeros(1, 1).expand(4, 4))
    rule = BufferRule({"model": module}, is_on=True)
    rule.keep()
    module.running_mean.fill_(torch.inf)
    rule.restore([torch.ones(())])
    assert module.running_mean.tolist() == [0.0] * 4


def test_only_a_skip_restores(run_loop):
    """Restoring buffers does not affect a run without skips."""
    fp32 = {"precision": "fp32"}
    assert_same_bits(run_loop(Ahead, fp32 | RESTORED).weights(), run_loop(Ahead, fp32).weights())
    calm = {"scaler": {"init_scale": 64.0}, "training": {"steps": 3}}
    plain = run_loop(Ahead, calm)
    restoring = run_loop(Ahead, {**calm, **RESTORED})
    assert not plain.list_skipped()
    assert_same_bits(restoring.weights(), plain.weights())


def test_a_retry_in_fp32_counts_its_batch(run_loop):
    """After a retry in fp32 the statistics include its batch."""
    values = {"scaler": RESTORED["scaler"] | {"retry_in_fp32": True}}
    run = run_loop(Ahead, values)
    assert len(run.of("retry", applied=True)) == len(run.list_skipped()) > 0
    assert statistics(run)["num_batches_tracked"] == 10
    assert all(buffer.isfinite().all() for buffer in statistics(run).values())


def test_a_resumed_run_is_the_same(run_loop, tmp_path):
    """A run resumed between two skips has the same restored buffers."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_loop(Regularly, RESTORED, folder=whole)
    values = {"checkpoints": {"every_steps": 5}}
    run_loop(Regularly, RESTORED | values, folder=cut)
    resumed = run_loop(Regularly, RESTORED, folder=whole, resume=cut / "step-00000005.pt")
    assert_same_bits(
        resumed.recipe.modules["model"].state_dict(),
        torch.load(cut / "step-00000010.pt", weights_only=True)["modules"]["model"],
    )


class Regularly(Ahead):
    """A recipe with a call counter in the checkpoint."""

    def state_dict(self):
        return {"calls": self.modules["model"][1].calls}

    def load_state_dict(self, state):
        self.modules["model"][1].calls = state["calls"]


def test_neither_waits_for_the_device():
    """Restoring and reporting buffers never reads a value, as torch's meta device shows."""
    modules = {"model": nn.BatchNorm1d(4, device="meta")}
    rule = BufferRule(modules, is_on=True)
    rule.keep()
    rule.restore([torch.zeros((), device="meta")])
    poison = NonfiniteBuffers(modules, pytest.fail)
    poison.before_step(1)
    poison.receive(make_skipped_steps(7))


def make_skipped_steps(step):
    """Return the record of a skipped step."""
    records = np.zeros(1, STEP_DTYPE)
    records["step"], records["flags"] = step, SKIPPED
    return records
