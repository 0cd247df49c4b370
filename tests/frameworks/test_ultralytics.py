"""Ultralytics with `halfstep.ultralytics.watch`, compared with the unwatched training."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.frameworks.reference import RecordingScaler, assert_true, read_written

os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
ultralytics = pytest.importorskip("ultralytics")
import halfstep  # noqa: E402
import halfstep.ultralytics  # noqa: E402

CLASSES, IMAGES = ("dark", "bright"), 16


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with two classes of images."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind, low in zip(CLASSES, (0, 128), strict=True):
            folder = tmp_path / "data" / part / kind
            folder.mkdir(parents=True)
            for i in range(IMAGES):
                pixels = generator.integers(low, low + 128, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "data"


def train(pictures: Path, project: Path, folder: Path | None) -> tuple[Any, nn.Module]:
    """Train a classifier for two epochs on the CPU, with a scaler as on CUDA."""
    model = ultralytics.YOLO("yolov8n-cls.yaml")
    scaler = RecordingScaler(2.0**127)  # which overflows in fp32, as fp16 does not on every CPU

    def put(trainer: Any) -> None:
        trainer.scaler, trainer.amp = scaler, False
        trainer.accumulate = 1

    model.add_callback("on_train_start", put)
    if folder:
        halfstep.ultralytics.watch(model, folder=folder)
    model.train(
        data=str(pictures),
        epochs=2,
        batch=8,
        nbs=8,
        imgsz=32,
        device="cpu",
        workers=0,
        amp=False,
        project=str(project),
        name="it",
        plots=False,
        verbose=False,
        pretrained=False,
        seed=0,
    )
    return scaler, model.trainer.model


def test_ultralytics_is_recorded_exactly(pictures: Path, tmp_path: Path) -> None:
    """Scales, skips and culprits equal the scaler's, and weights those without a watch."""
    bare, without = train(pictures, tmp_path / "bare", None)
    watched, with_us = train(pictures, tmp_path / "watched", tmp_path / "runs")
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, with_us.parameters(), without.parameters()))
    assert_true(tmp_path / "runs", watched, with_us)
    _, events = read_written(tmp_path / "runs")
    assert {event["event"] for event in events} >= {"metric", "checkpoint"}
    run = json.loads((tmp_path / "runs" / "it" / "run.json").read_text())
    assert run["config"]["imgsz"] == 32
