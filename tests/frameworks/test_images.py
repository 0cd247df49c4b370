"""The recipe `images` with torchvision, on the digits' PNG files and on a broken one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))

from halfstep.run_config import parse_config
from tests.trainer.conftest import CPU, assert_same_bits, run_loop  # noqa: F401 - a fixture
from trainer.data.examples import DataError
from trainer.diagnosis.check import check
from trainer.recipes.digit_files import write_digits
from trainer.recipes.images import NETWORKS, Images

Values = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits' PNG files."""
    path = tmp_path_factory.mktemp("digits")
    write_digits(path)
    return path


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Two classes with six random images each."""
    noise = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for number in range(6):
            pixels = torch.randint(0, 256, (40, 48, 3), generator=noise, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / f"few/{name}/{number}.png")
    return tmp_path / "few"


def of(folder: Path, steps: int, **changes: Values) -> Values:
    """Return a configuration in fp32, which is fastest on a CPU."""
    training = {"steps": steps, "warmup_steps": 1, "batch_size": 4} | changes.pop("training", {})
    recipe = {"folder": str(folder)} | changes.pop("recipe", {})
    values = {"precision": "fp32", "training": training, "recipe": recipe}
    return values | {"evaluation": {"every_steps": None}} | changes


def test_it_learns_the_digits(run_loop: Any, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """With PNG files read by data workers top-1 is far above chance, also for averaged weights."""
    values = of(folder, 60, training={"batch_size": 32, "warmup_steps": 5, "ema_decay": 0.9})
    run = run_loop(Images, values, folder=tmp_path / "checkpoints")
    metrics = {event["name"]: event["value"] for event in run.of("metric")}
    assert metrics["val/top1"] > 0.6
    assert metrics["val/top1"] < metrics["val/top5"] <= 1
    assert metrics["ema/val/top1"] > 0.3
    assert (tmp_path / "artifacts/step-00000060/classes.txt").read_text().split() == [*"0123456789"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_it_trains_in_half_precision_with_all_settings(
    run_loop: Any,  # noqa: F811
    few: Path,
    precision: str,
) -> None:
    """Mixup, smoothing, mirror, RandAugment, crops and channels last work; top-5 of two classes
    is 1.
    """
    own: Values = {"mixup": 0.4, "label_smoothing": 0.1, "mirror": True, "rand_augment": True}
    run = run_loop(Images, of(few, 2, recipe=own) | {"precision": precision})
    assert len(run.records) == 2
    assert run.of("metric", name="val/top5")[-1]["value"] == 1
    weight = run.recipe.modules["model"].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_it_resumes_exactly_with_other_workers(
    run_loop: Any,  # noqa: F811
    few: Path,
    tmp_path: Path,
) -> None:
    """Augmentation and mixup depend on an example's position: equal bits with 0 and 2 workers."""
    own: Values = {"mixup": 0.4, "mirror": True, "rand_augment": True}
    values = of(few, 4, recipe=own, checkpoints={"every_steps": 2})
    whole = run_loop(Images, values | {"data": {"workers": 0}}, folder=tmp_path / "whole")
    checkpoint = tmp_path / "whole/step-00000002.pt"
    resumed = run_loop(
        Images, values | {"data": {"workers": 2}}, folder=tmp_path / "whole", resume=checkpoint
    )
    [event] = resumed.of("resumed")
    assert event["notes"] == []
    assert_same_bits(resumed.weights(), whole.weights())


def test_a_broken_image_ends_the_run_by_its_name(run_loop: Any, few: Path) -> None:  # noqa: F811
    """A broken image ends the run with the names of example and file."""
    (few / "cat/1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"example \d+ cannot be read .*few/cat/1.png cannot be"):
        run_loop(Images, of(few, 4))


def test_the_networks_operations_are_counted(few: Path) -> None:
    """ResNet-18 at 224 pixels has 1.8 billion multiplications, and a step takes three times
    that.
    """
    recipe = Images(parse_config(Images, {"recipe": {"folder": str(few), "size": 224}}), CPU)
    assert recipe.flops() == pytest.approx(6 * 1.82e9, rel=0.05)


def test_the_deeper_network_trains(run_loop: Any, few: Path) -> None:  # noqa: F811
    """ResNet-50 trains two steps of two images, with final features of 1 × 1 pixels."""
    own: Values = {"network": "resnet50"}
    run = run_loop(Images, of(few, 2, training={"batch_size": 2}, recipe=own))
    assert run.records["loss"].shape == (2,)
    assert torch.isfinite(torch.from_numpy(run.records["loss"])).all()
    assert (run.records["flags"] == 0).all()
    blocks = [run.recipe.modules["model"].get_submodule(f"layer{n}") for n in range(1, 5)]
    assert [len(block) for block in blocks] == [3, 4, 6, 3]  # 3 layers each, and 2 others: 50


@pytest.mark.parametrize(("network", "millions"), [("resnet18", 11.7), ("resnet50", 25.6)])
def test_the_networks_have_the_published_sizes(network: str, millions: float) -> None:
    """The networks have the published numbers of parameters for a thousand classes."""
    with torch.device("meta"):
        made = NETWORKS[network](num_classes=1000)
    assert sum(each.numel() for each in made.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.05
    )


def test_the_check_finds_no_mistake(few: Path) -> None:
    """`halfstep recipe check` of images finds no mistake for CUDA."""
    assert check(Images, {"recipe": {"folder": str(few), "mixup": 0.2}}).errors == []
