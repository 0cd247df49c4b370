"""Steps replayed from a CUDA graph compute the same as steps without one."""

import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

from tests.gpu.device import DEVICE, needs_cuda
from tests.trainer import graph_made

pytestmark = needs_cuda


@pytest.fixture
def replays(monkeypatch):
    """Return a list that gets an item for each replay of a graph."""
    found, replay = [], torch.cuda.CUDAGraph.replay

    def count(graph):
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return found


@pytest.mark.parametrize(("recipe", "values", "training"), graph_made.CASES)
def test_a_graph_changes_no_bit(run_loop, replays, recipe, values, training):
    """With a graph rows, logged values and weights are bit-equal, with skips, clips and dropout."""
    graph_made.assert_a_graph_changes_no_bit(run_loop, DEVICE, replays, recipe, values, training)


def test_a_resumed_run_is_that_which_never_stopped(run_loop, tmp_path, replays):
    """A run that is resumed and captured again is bit-equal to an uninterrupted one."""
    graph_made.assert_a_resumed_run_is_exact(run_loop, DEVICE, replays, tmp_path)


class Synchronizing(graph_made.Logging):
    """A recipe that waits for the device in a way that only a capture shows."""

    name: ClassVar = "synchronizing"

    def training_step(self, batch):
        torch.cuda.current_stream().synchronize()
        yield from super().training_step(batch)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (graph_made.Waiting, "graph_made.py"),
        (graph_made.Drawing, "random numbers on the host"),
        (graph_made.Counting, "logs values of the host"),
        (Synchronizing, "captur"),
    ],
)
def test_a_recipe_that_cannot_be_captured_trains_without(run_loop, replays, recipe, reason):
    """A recipe that cannot be captured trains without a graph, with one message."""
    graph_made.assert_it_trains_without(run_loop, DEVICE, replays, recipe, reason)


DETERMINISTIC = """
import os, torch
from halfstep.config_groups import Training
from trainer.setup import set_up_process

device = set_up_process(torch.device("cuda"), Training())
assert torch.are_deterministic_algorithms_enabled()
net = torch.nn.Linear(64, 64).to(device)
x = torch.randn(512, 64, device=device)
net(x).sum().backward()  # in the thread of autograd
torch.bmm(x[None], x.T[None]).sum().item()
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


def test_cublas_needs_its_variable_only_once():
    """cuBLAS reads its variable for deterministic products once, not again in later ones."""
    bare = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", DETERMINISTIC]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("None", 0), done.stderr
