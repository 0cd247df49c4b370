"""Frameworks that need no adapter, compared with unwatched training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from tests.frameworks.reference import (
    Net,
    RecordingScaler,
    assert_true,
    read_written,
    samples,
    weights,
)

OVERFLOWING = 2.0**127  # in fp32 too: these frameworks autocast only on a GPU


def ignite_training(folder: Path | None) -> tuple[RecordingScaler, Net]:
    """Train by Ignite's engine for mixed precision, with an evaluation after each epoch."""
    from ignite.engine import (
        Events,
        create_supervised_evaluator,
        create_supervised_trainer,
    )
    from ignite.metrics import MeanAbsoluteError

    net, scaler = Net(), RecordingScaler(OVERFLOWING)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loss = torch.nn.functional.mse_loss
    trainer = create_supervised_trainer(net, optimizer, loss, amp_mode="amp", scaler=scaler)
    evaluator = create_supervised_evaluator(net, metrics={"mae": MeanAbsoluteError()})
    loader = DataLoader(TensorDataset(*samples()), batch_size=8)
    if folder:
        watch = halfstep.watch(net, folder=folder)
        evaluator.add_event_handler(Events.COMPLETED, lambda e: watch.log(e.state.metrics))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(loader))
    trainer.run(loader, max_epochs=2)
    return scaler, net


def monai_training(folder: Path | None) -> tuple[RecordingScaler, Net]:
    """Train by MONAI's SupervisedTrainer, with an evaluator after each epoch."""
    from ignite.engine import Events
    from ignite.metrics import MeanAbsoluteError
    from monai.engines import SupervisedEvaluator, SupervisedTrainer

    net, scaler = Net(), RecordingScaler(OVERFLOWING)
    x, y = samples()
    data = [{"image": a, "label": b} for a, b in zip(x, y, strict=True)]
    loader, device = DataLoader(data, batch_size=8), torch.device("cpu")
    metric = MeanAbsoluteError(
        lambda output: tuple(
            torch.stack([each[key] for each in output]) for key in ("pred", "label")
        )
    )
    evaluator = SupervisedEvaluator(device, loader, net, key_val_metric={"mae": metric})
    trainer = SupervisedTrainer(
        device=device,
        max_epochs=2,
        train_data_loader=loader,
        network=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        loss_function=torch.nn.MSELoss(),
        amp=True,
    )
    # `run` makes a scaler, which is disabled without a GPU.
    trainer.add_event_handler(Events.STARTED, lambda engine: setattr(engine, "scaler", scaler))
    if folder:
        watch = halfstep.watch(net, folder=folder)
        evaluator.add_event_handler(Events.COMPLETED, lambda e: watch.log(e.state.metrics))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run())
    trainer.run()
    return scaler, net


@pytest.mark.parametrize(
    ("package", "train"), [("ignite", ignite_training), ("monai", monai_training)]
)
def test_engines_are_recorded_exactly(tmp_path: Path, package: str, train: Any) -> None:
    """Scales, skips and culprits equal the scaler's, and weights those without a watch."""
    pytest.importorskip(package)
    bare, without = train(None)
    watched, with_us = train(tmp_path)
    halfstep.watch().finish()
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, weights(with_us), weights(without)))
    assert_true(tmp_path, watched)
    maes = [(e["step"], e["value"]) for e in read_written(tmp_path)[1] if e.get("name") == "mae"]
    assert [step for step, _ in maes] == [12, 24]
    assert all(0 < value < 10 for _, value in maes)


def test_skorch_is_recorded_exactly(tmp_path: Path) -> None:
    """Losses equal skorch's history, and weights those without a watch."""
    skorch = pytest.importorskip("skorch")
    x, y = (each.numpy() for each in samples())

    def fit(folder: Path | None) -> Any:
        torch.manual_seed(0)
        net = skorch.NeuralNetRegressor(
            Net, optimizer=torch.optim.AdamW, lr=1e-2, max_epochs=2, batch_size=8, verbose=0
        )
        net.initialize()
        if folder:
            halfstep.watch(net.module_, folder=folder)
        return net.partial_fit(x, y)

    without, net = fit(None), fit(tmp_path)
    halfstep.watch().log({"valid_loss": net.history[-1]["valid_loss"]})
    halfstep.watch().finish()
    assert all(map(torch.equal, weights(net.module_), weights(without.module_)))
    losses = [b["train_loss"] for e in net.history for b in e["batches"] if "train_loss" in b]
    steps, _ = read_written(tmp_path)
    assert steps["loss"].tolist() == np.float32(losses).tolist()
    assert steps["lr"] == pytest.approx(1e-2)


def test_pytorch_geometric_is_recorded_exactly(tmp_path: Path) -> None:
    """Scales, skips and culprits of the loop in PyG's documentation equal the scaler's."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCN, global_mean_pool

    x, y = samples()
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graphs = [
        Data(x=x[i : i + 4], edge_index=edges, y=y[i : i + 4].mean(dim=0)) for i in range(0, 96, 4)
    ]

    def train(folder: Path | None) -> tuple[RecordingScaler, Any]:
        torch.manual_seed(0)
        net, scaler = GCN(8, 16, num_layers=2, out_channels=1), RecordingScaler()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if folder:
            halfstep.watch(net, folder=folder)
        for _ in range(4):
            for batch in GraphLoader(graphs, batch_size=4):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = global_mean_pool(net(batch.x, batch.edge_index), batch.batch)
                    loss = (out - batch.y.unsqueeze(1)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return scaler, net

    bare, without = train(None)
    watched, with_us = train(tmp_path)
    halfstep.watch().finish()
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, weights(with_us), weights(without)))
    assert_true(tmp_path, watched, with_us)
