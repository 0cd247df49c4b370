"""Stable-Baselines3 with `halfstep.stable_baselines3.Watch`, compared with unwatched training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks.reference import read_written, weights

sb3 = pytest.importorskip("stable_baselines3")
import halfstep.stable_baselines3  # noqa: E402


def learn(callback: Any) -> Any:
    """Train PPO for two rollouts of 64 steps, each with two epochs of 4 minibatches."""
    model = sb3.PPO(
        "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, n_epochs=2, seed=0, device="cpu"
    )
    return model.learn(128, callback=callback, log_interval=1)


def test_stable_baselines3_is_recorded_exactly(tmp_path: Path) -> None:
    """Each step and logged number is recorded, and weights equal those of an unwatched loop."""
    bare = learn(None)
    watched = learn(halfstep.stable_baselines3.Watch(folder=tmp_path))
    assert all(map(torch.equal, weights(watched.policy), weights(bare.policy)))
    steps, events = read_written(tmp_path)
    assert steps["step"].tolist() == list(range(1, 17))
    assert steps["lr"] == pytest.approx(3e-4)
    assert np.isfinite(steps["loss"]).all()
    assert (steps["grad_norm"] > 0).all()
    metrics = {}
    for event in events:
        if event["event"] == "metric":
            metrics.setdefault(event["name"], []).append((event["step"], event["value"]))
    assert metrics["time/total_timesteps"] == [(0, 64), (8, 128)]
    assert {"rollout/ep_rew_mean", "train/approx_kl", "train/value_loss"} <= set(metrics)
    [place] = tmp_path.iterdir()
    run = json.loads((place / "run.json").read_text())
    assert (run["name"], run["config"]["batch_size"], run["config"]["gamma"]) == ("PPO", 16, 0.99)
    assert json.loads((place / "outcome-1.json").read_text())["status"] == "finished"
    assert len(watched.logger.output_formats) == len(bare.logger.output_formats)
