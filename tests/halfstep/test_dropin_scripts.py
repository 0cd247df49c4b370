"""Scripts for W&B and Trackio, changed only in their import and sent to a server."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx2

from db.access import accounts
from db.database import Database
from db.tables import User
from halfstep import Client
from tests import warm
from tests.site import SECONDS, until

#: As W&B's examples for PyTorch are written; history.json has what it logs.
WANDB = """
import argparse
import json

import numpy as np
import torch
import torch.nn.functional as F
import wandb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def make_data(count):
    x = torch.rand(count, 2) * 2 - 1
    return TensorDataset(x, (x.square().sum(1) < 0.6).long())


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Linear(2, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


def evaluate(model, data):
    x, y = data.tensors
    with torch.no_grad():
        logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item(), logits


def main():
    args = parse_args()
    run = wandb.init(
        project="circles",
        name="baseline",
        group="ablation",
        job_type="train",
        tags=["relu", "sgd"],
        notes="A first try.",
        config=vars(args),
    )
    config = wandb.config
    config.width = 16
    wandb.define_metric("epoch")
    wandb.define_metric("val/*", step_metric="epoch")
    wandb.define_metric("val/accuracy", summary="max")
    torch.manual_seed(config.seed)
    train_data, val_data = make_data(128), make_data(64)
    loader = DataLoader(train_data, batch_size=config.batch_size, shuffle=True)
    model = Net(config.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wandb.watch(model, log="all", log_freq=4)
    history, best = [], 0.0
    for epoch in range(config.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            row = {"train/loss": loss.item(), "train/scale": scaler.get_scale()}
            wandb.log(row)
            history.append(row)
        val_loss, accuracy, logits = evaluate(model, val_data)
        best = max(best, accuracy)
        row = {"epoch": epoch, "val/loss": val_loss, "val/accuracy": accuracy}
        history.append(row)
        table = wandb.Table(columns=["x", "y", "label", "prediction"])
        for point, label, scores in zip(*val_data.tensors, logits):
            table.add_data(*point.tolist(), label.item(), scores.argmax().item())
        wandb.log(
            {
                **row,
                "predictions": table,
                "logits": wandb.Histogram(logits),
                "map": wandb.Image(logits.softmax(1).view(8, 8, 2)[..., 0].numpy(), caption="map"),
                "confusion": wandb.plot.confusion_matrix(
                    y_true=val_data.tensors[1].tolist(),
                    preds=logits.argmax(1).tolist(),
                    class_names=["out", "in"],
                ),
            }
        )
    wandb.summary["best_accuracy"] = best
    torch.save(model.state_dict(), "model.pt")
    artifact = wandb.Artifact("circles-model", type="model", metadata={"accuracy": best})
    artifact.add_file("model.pt")
    run.log_artifact(artifact)
    with open("history.json", "w") as file:
        json.dump({"history": history, "best": best}, file)
    wandb.finish()


if __name__ == "__main__":
    main()
"""

#: As Trackio's examples are written; history.json has what it logs.
TRACKIO = """
import json
import math
import random

import numpy as np
import trackio

random.seed(0)
EPOCHS = 6
everything = {}
for number, lr in enumerate([0.1, 0.01]):
    name = f"run-{number}"
    trackio.init(
        project="fake-training",
        name=name,
        group="rates",
        config={"epochs": EPOCHS, "learning_rate": lr, "batch_size": 64},
    )
    history = []
    for epoch in range(EPOCHS):
        train_loss = math.exp(-lr * 10 * epoch) + random.uniform(0, 0.05)
        row = {
            "train/loss": train_loss,
            "train/accuracy": 1 - train_loss / 2,
            "val": {"loss": train_loss * 1.1, "accuracy": 0.9 - train_loss / 2},
        }
        history.append(row)
        trackio.log(row)
        if epoch % 3 == 2:
            noise = (np.random.default_rng(epoch).random((16, 16, 3)) * 255).astype(np.uint8)
            trackio.log(
                {
                    "samples": trackio.Image(noise, caption=f"epoch {epoch}"),
                    "table": trackio.Table(columns=["epoch", "lr"], data=[[epoch, lr]]),
                },
                step=epoch,
            )
    if history[-1]["train/loss"] > 0.5:
        trackio.alert("High loss", text=f"{name} has not converged", level=trackio.AlertLevel.WARN)
    everything[name] = history
    trackio.finish()
with open("history.json", "w") as file:
    json.dump(everything, file)
"""


def run_script(text: str, name: str, folder: Path, server: dict[str, str]) -> Any:
    """Run a script with Halfstep instead of a package; return what it has logged."""
    old = f"import {name}\n"
    assert text.count(old) == 1
    (folder / "train.py").write_text(text.replace(old, f"import halfstep as {name}\n"))
    environment = {**os.environ, **server}
    done = warm.run([sys.executable, "train.py"], SECONDS, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    ignored = [line for line in done.stderr.splitlines() if "not supported" in line]
    assert all("Artifact(metadata=…)" in line for line in ignored), ignored
    return json.loads((folder / "history.json").read_text())


def wait_for_runs(client: Client, *names: str) -> dict[str, Any]:
    """Return the finished runs of these names, in detail."""

    def are_over() -> bool:
        return [run["status"] for run in client.runs()] == ["finished"] * len(names)

    until(are_over)
    runs = {run["name"]: client.run(run["id"]) for run in client.runs()}
    assert runs.keys() == set(names)
    return runs


def logged(client: Client, run_id: int, name: str) -> list[float]:
    return list(client.metrics(run_id)[name].value)


def test_a_script_of_wandb(
    tmp_path: Path, client: Client, server: dict[str, str], database: Database, ada: User
) -> None:
    """A W&B script's numbers, labels, media, summary and artifact are recorded; group and
    job_type are on the page and can be filtered.
    """
    truth = run_script(WANDB, "wandb", tmp_path, server)
    [run] = wait_for_runs(client, "baseline").values()
    assert (run["project"], run["tags"], run["note"]) == (
        "circles",
        ["relu", "sgd"],
        "A first try.",
    )
    expected = {"epochs": 3, "batch_size": 16, "lr": 0.05, "seed": 7, "width": 16}
    expected |= {"group": "ablation", "job_type": "train"}
    assert expected.items() <= run["config"].items()
    for name in ("train/loss", "train/scale", "epoch", "val/loss", "val/accuracy"):
        assert logged(client, run["id"], name) == [
            row[name] for row in truth["history"] if name in row
        ]
    assert (run["step"], run["precision"], run["skipped"]) == (24, "bf16", 0)
    assert logged(client, run["id"], "summary/best_accuracy") == [truth["best"]]
    assert logged(client, run["id"], "summary/val/accuracy.max") == [truth["best"]]
    files = {file["path"].rpartition("/")[2] for file in client.artifacts(run["id"])}
    assert files >= {"predictions.csv", "map.png", "map.caption.txt", "confusion.plot.json"}
    assert files >= {"logits.histogram.json", "summary.csv"}
    version = client.artifact_version("circles-model:latest", project="circles")
    assert [entry["path"] for entry in version["entries"]] == ["model.pt"]
    assert [each["id"] for each in client.runs("group=ablation job_type=train")] == [run["id"]]
    assert list(client.runs("group=other")) == []
    with database.writing() as session:
        link = accounts.make_link_token(session, ada)
    with httpx2.Client(base_url=server["HALFSTEP_URL"], follow_redirects=True) as browser:
        browser.post("/", data={"token": link}, headers={"origin": server["HALFSTEP_URL"]})
        page = browser.get(f"/runs/{run['id']}").text
        grouped = browser.get("/runs", params={"group": "job_type"}).text
    for shown in ("group", "ablation", "job_type", "train"):
        assert f">{shown}<" in page
    assert 'title="train: its runs">train</a>' in grouped


def test_a_script_of_trackio(tmp_path: Path, client: Client, server: dict[str, str]) -> None:
    """Each `init` of Trackio is a run with configuration, nested numbers, media and alert."""
    truth = run_script(TRACKIO, "trackio", tmp_path, server)
    runs = wait_for_runs(client, *truth)
    for name, rate in (("run-0", 0.1), ("run-1", 0.01)):
        run, history = runs[name], truth[name]
        assert run["project"] == "fake-training"
        expected = {"epochs": 6, "learning_rate": rate, "batch_size": 64, "group": "rates"}
        assert expected.items() <= run["config"].items()
        for key in ("train/loss", "train/accuracy"):
            assert logged(client, run["id"], key) == [row[key] for row in history]
        for key in ("loss", "accuracy"):
            assert logged(client, run["id"], f"val.{key}") == [row["val"][key] for row in history]
        files = [file["path"].rpartition("/")[2] for file in client.artifacts(run["id"])]
        assert files.count("samples.png") == files.count("table.csv") == 2
    [alert] = client.alerts()
    assert alert["run_id"] == runs["run-1"]["id"]
