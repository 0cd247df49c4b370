"""fastai with `halfstep.fastai.Watch`, compared with unwatched training."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import halfstep
from tests.frameworks.reference import (
    Net,
    RecordingScaler,
    assert_true,
    read_written,
    samples,
    weights,
)

pytest.importorskip("fastai")
from fastai.basics import Adam, DataLoaders, Learner, OptimWrapper
from fastai.callback import fp16, progress, schedule  # noqa: F401 - they add methods
from fastai.data.load import DataLoader

import halfstep.fastai

TORCHS = functools.partial(OptimWrapper, opt=torch.optim.AdamW)


class Samples(TensorDataset):  # type: ignore[type-arg]
    """A dataset that fastai can export."""

    def new_empty(self) -> "Samples":
        """Return the dataset of an exported learner."""
        return self


class Rates(halfstep.fastai.Callback):  # type: ignore[misc]
    """A callback that records loss and learning rate of each training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def after_batch(self) -> None:
        """Record the learning rates of the step."""
        if self.training:
            self.losses.append(self.learn.loss.item())

    def before_step(self) -> None:
        """Record the step's learning rate."""
        self.rates.append(self.learn.opt.hypers[-1]["lr"])


def learner(optimizer: Any, *callbacks: Any) -> Any:
    torch.manual_seed(0)
    data = Samples(*samples())
    loaders = DataLoaders(DataLoader(data, bs=8), DataLoader(data, bs=8), device="cpu")
    loss = torch.nn.functional.mse_loss
    return Learner(loaders, Net(), loss_func=loss, opt_func=optimizer, cbs=callbacks)


def fit(optimizer: Any, *callbacks: Any) -> Any:
    """Train for three epochs in two fits, and predict."""
    learn = learner(optimizer, *callbacks)
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(2, 1e-2)
        learn.fit(1, 1e-2)
        learn.get_preds()
    return learn


@pytest.mark.parametrize("optimizer", [Adam, TORCHS])
def test_all_fits_are_one_exact_run(tmp_path: Path, optimizer: Any) -> None:
    """Weights equal those without a watch, with an optimizer of fastai or of torch."""
    rates = Rates()
    watched = fit(optimizer, rates, halfstep.fastai.Watch(folder=tmp_path))
    halfstep.watch().finish()
    assert all(map(torch.equal, weights(watched.model), weights(fit(optimizer).model)))
    steps, events = read_written(tmp_path)
    assert steps["step"].tolist() == list(range(1, 37))
    assert steps["lr"] == pytest.approx(rates.rates, rel=1e-6)
    assert steps["loss"] == pytest.approx(rates.losses, rel=1e-6)
    x, y = samples()
    net = Net()
    torch.nn.functional.mse_loss(net(x[:8]), y[:8]).backward()
    squares = sum(p.grad.square().sum().item() for p in net.parameters() if p.grad is not None)
    assert steps["grad_norm"][0] == pytest.approx(np.sqrt(squares), rel=1e-5)
    metrics = [event for event in events if event["event"] == "metric"]
    assert {event["name"] for event in metrics} == {"train_loss", "valid_loss"}
    assert {event["step"] for event in metrics} == {12, 24, 36}
    [place] = tmp_path.iterdir()
    assert json.loads((place / "run.json").read_text())["config"]["batch_size"] == 8


@pytest.mark.parametrize("optimizer", [Adam, TORCHS])
def test_a_step_with_torchs_scaler_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Any
) -> None:
    """With fastai's own fp16 callback, made to use a CPU scaler, each step is recorded once."""
    scalers: list[RecordingScaler] = []

    def scaler(device: str, **_further: Any) -> RecordingScaler:
        scalers.append(RecordingScaler())
        return scalers[-1]

    monkeypatch.setattr(fp16, "GradScaler", scaler)
    monkeypatch.setattr(fp16, "autocast", lambda _, dtype: torch.autocast("cpu", dtype=dtype))

    def train(*callbacks: Any) -> Any:
        learn = learner(optimizer, *callbacks).to_fp16()
        with learn.no_bar(), learn.no_logging():
            learn.fit(2, 1e-2)
        return learn

    bare = train()
    watched = train(halfstep.fastai.Watch(folder=tmp_path))
    halfstep.watch().finish()
    assert all(map(torch.equal, weights(watched.model), weights(bare.model)))
    assert_true(tmp_path, scalers[-1])


def test_the_search_for_a_rate_is_not_watched(tmp_path: Path) -> None:
    """The learning-rate finder makes no run, since it restores the weights."""
    learn = learner(Adam, halfstep.fastai.Watch(folder=tmp_path))
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(num_it=5, show_plot=False)
        assert not list(tmp_path.iterdir())
        learn.fit(1)
    halfstep.watch().finish()
    steps, _ = read_written(tmp_path)
    assert len(steps) == 12


@pytest.mark.parametrize("optimizer", [Adam, TORCHS])
def test_a_watched_learner_can_be_exported(tmp_path: Path, optimizer: Any) -> None:
    """An exported learner has no run, predicts when loaded, and is watched in its next fit."""
    learn = fit(optimizer, halfstep.fastai.Watch(folder=tmp_path / "runs"))
    halfstep.watch().finish()
    learn.export(tmp_path / "learner.pkl")
    loaded = torch.load(tmp_path / "learner.pkl", weights_only=False)
    assert loaded.watch.watched is None
    assert all(map(torch.equal, weights(loaded.model), weights(learn.model)))
