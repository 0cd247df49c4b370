"""Steps in a CUDA graph, by a stand-in on a CPU; tests/gpu uses the real one."""

import random

import numpy as np
import pytest
import torch

from tests.marks import extended
from tests.trainer import graph_made
from tests.trainer.conftest import CPU, Pair, Regression, assert_same_bits
from tests.trainer.diagnosis.spikes_made import VALUES, Poisoned
from trainer import cuda_graph, setup, step
from trainer.diagnosis import missing_gradients


@pytest.fixture
def replays(monkeypatch):
    """Replace CUDA by a stand-in; return a list that gets an item for each replay of a graph."""
    found = []

    class Counted(graph_made.StandIn):
        def replay(self):
            found.append(self)
            super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)
    monkeypatch.setattr(torch.cuda, "graph", graph_made.capture_by_stand_in)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(cuda_graph, "_check_generator", lambda cause: None)
    # Dropout of a processor draws from the host's generator.
    monkeypatch.setattr(cuda_graph, "_host_generators", random.getstate)
    monkeypatch.setattr(setup, "find_obstacle", lambda *arguments: "")
    monkeypatch.setattr(step, "value_on_host", lambda tensor: None)
    return found


@pytest.mark.parametrize(
    ("recipe", "values", "training"),
    [case if case[0] is graph_made.Logging else extended([case])[0] for case in graph_made.CASES],
)
def test_a_graph_changes_no_bit(run_loop, replays, recipe, values, training):
    """With a graph rows, logged values and weights are bit-equal, with skips, clips and dropout."""
    graph_made.assert_a_graph_changes_no_bit(run_loop, CPU, replays, recipe, values, training)


def test_a_resumed_run_is_that_which_never_stopped(run_loop, tmp_path, replays):
    """A run that is resumed and captured again is bit-equal to an uninterrupted one."""
    graph_made.assert_a_resumed_run_is_exact(run_loop, CPU, replays, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (graph_made.Waiting, "not permitted when stream is capturing"),
        (graph_made.Drawing, "random numbers on the host"),
        (graph_made.Counting, "logs values of the host"),
    ],
)
def test_a_recipe_that_cannot_be_captured_trains_without(run_loop, replays, recipe, reason):
    """A recipe that cannot be captured trains without a graph, with one message."""
    graph_made.assert_it_trains_without(run_loop, CPU, replays, recipe, reason)


def test_rates_of_attempted_steps_are_recorded(run_loop, replays):
    """With a graph the recorded rate is the nearest fp32 number."""
    values = {"training": {"steps": 130, "schedule": "cosine", "warmup_steps": 10}}
    plain = run_loop(graph_made.Logging, values)
    graphed = values | {"training": values["training"] | {"cuda_graph": True}}
    run = run_loop(graph_made.Logging, graphed)
    assert replays
    assert np.array_equal(run.records["lr"], plain.records["lr"].astype(np.float32))


@pytest.mark.parametrize(
    ("recipe", "training", "reason"),
    [
        (Regression, {}, "the device is cpu, not cuda"),
        (Pair, {}, "the device is cpu, not cuda"),
    ],
)
def test_without_cuda_a_run_trains_as_usual(run_loop, recipe, training, reason):
    """Without CUDA the run trains as usual, with a message before the first step."""
    plain = run_loop(recipe, {"training": training})
    run = run_loop(recipe, {"training": training | {"cuda_graph": True}})
    [left_out] = run.of("left_out")
    assert (left_out["step"], left_out["reason"]) == (0, reason)
    assert run.records["lr"].tolist() == plain.records["lr"].tolist()
    assert run.records["loss"].tolist() == plain.records["loss"].tolist()


def test_a_rollback_captures_anew(run_loop, tmp_path, replays, monkeypatch):
    """A rollback captures a new graph, since the old one would train replaced optimizer state."""
    monkeypatch.setattr(missing_gradients, "STEPS_OF_A_PARAMETER", 3)
    training = VALUES["training"] | {"schedule_counts": "applied"}
    plain = run_loop(Poisoned, VALUES | {"training": training}, tmp_path / "a")
    graphed = VALUES | {"training": training | {"cuda_graph": True}}
    run = run_loop(Poisoned, graphed, tmp_path / "b")
    assert run.of("rolled_back")
    assert len(set(replays)) > 1
    assert run.records["loss"].tobytes() == plain.records["loss"].tobytes()
    assert_same_bits(run.weights(), plain.weights())
