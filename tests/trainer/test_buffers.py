"""Running statistics after a skip that began ahead of them: named, and by a setting restored."""

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.spool import SKIPPED, STEP_DTYPE
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.buffers import BufferRule
from trainer.diagnosis.poison import Poison


class Shouting(nn.Module):
    """Overflows in fp16 from some call on, going forward, in every so many."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        factor = 60_000.0 if self.calls % 4 == 0 and x.dtype == torch.float16 else 1.0
        return x * factor * factor


class Ahead(Regression):
    """An overflow, then a BatchNorm, in fp16 by default."""

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
    """The buffers of its BatchNorm."""
    return dict(run.recipe.modules["model"][2].named_buffers())


def test_poisoned_buffers_are_named_once(run_loop):
    """After the first skip, with its step; those that are sound are not named, nor are they again
    at the next skip."""
    run = run_loop(Ahead)
    assert run.skipped() == [4, 8]
    assert not statistics(run)["running_mean"].isfinite().all()
    [told] = run.of("poison")
    assert told["buffers"] == ["model.2.running_mean", "model.2.running_var"]
    assert (told["step"], told["count"]) == (8, 2)  # both had come when it looked


def test_restored_buffers_are_those_before_the_skip(run_loop):
    """Also those that count: all are as if the skipped batches had never been seen."""
    run = run_loop(Ahead, RESTORED)
    assert run.skipped() == [4, 8]
    assert all(buffer.isfinite().all() for buffer in statistics(run).values())
    assert statistics(run)["num_batches_tracked"] == 8
    assert not run.of("poison")


def test_expanded_buffers_are_left_alone():
    """They cannot be written in place; the others beside them are restored."""
    module = nn.BatchNorm1d(4)
    module.register_buffer("shared", torch.zeros(1, 1).expand(4, 4))
    rule = BufferRule({"model": module}, is_on=True)
    rule.keep()
    module.running_mean.fill_(torch.inf)
    rule.restore([torch.ones(())])
    assert module.running_mean.tolist() == [0.0] * 4


def test_only_a_skip_restores(run_loop):
    """A run without skips ends with the same bits either way."""
    fp32 = {"precision": "fp32"}
    assert_same_bits(run_loop(Ahead, fp32 | RESTORED).weights(), run_loop(Ahead, fp32).weights())
    calm = {"scaler": {"init_scale": 64.0}, "training": {"steps": 3}}
    plain = run_loop(Ahead, calm)
    restoring = run_loop(Ahead, {**calm, **RESTORED})
    assert not plain.skipped()
    assert_same_bits(restoring.weights(), plain.weights())


def test_a_retry_in_fp32_counts_its_batch(run_loop):
    """The restored statistics take in the batch as it is computed in fp32."""
    values = {"scaler": RESTORED["scaler"] | {"retry_in_fp32": True}}
    run = run_loop(Ahead, values)
    assert len(run.of("retry", applied=True)) == len(run.skipped()) > 0
    assert statistics(run)["num_batches_tracked"] == 10
    assert all(buffer.isfinite().all() for buffer in statistics(run).values())


def test_a_resumed_run_is_the_same(run_loop, tmp_path):
    """Cut between two skips, with buffers restored."""
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
    """Its calls are counted in the checkpoint."""

    def state_dict(self):
        return {"calls": self.modules["model"][1].calls}

    def load_state_dict(self, state):
        self.modules["model"][1].calls = state["calls"]


def test_neither_waits_for_the_device():
    """On torch's meta device, where whatever reads a value raises."""
    modules = {"model": nn.BatchNorm1d(4, device="meta")}
    rule = BufferRule(modules, is_on=True)
    rule.keep()
    rule.restore([torch.zeros((), device="meta")])
    poison = Poison(modules, pytest.fail)
    poison.arrived(skipped_steps())


def skipped_steps():
    """A record of a skipped step."""
    records = np.zeros(1, STEP_DTYPE)
    records["step"], records["flags"] = 7, SKIPPED
    return records
