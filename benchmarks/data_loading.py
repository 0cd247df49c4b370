"""Speed of reading a dataset by workers, and time to the first batch of a resumed run.

    python -m benchmarks.data_loading

Both loops train the same small network on the same JPEG files, decoded by Pillow in two workers:
the service's own, with all that follows it, and the loop of PyTorch's tutorials on a bare
DataLoader. They take turns in one run, and each is timed from its tenth batch on, when its workers
are at work. Then a run with a checkpoint at example 9,000,000 of 10,000,000 is resumed. Its time is
from the call to its first batch, in which it reads the checkpoint, starts the workers and computes
the rest of the epoch's order.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import report
from halfstep.recipe import Loss, Recipe
from halfstep.run_config import RunConfig, parse_config
from trainer.distributed.ranks import Control
from trainer.loop import train
from trainer.setup import prepare_run

BAR_SHARE, BAR_SECONDS = 0.97, 2.0
FILES, PIXELS, CROP = 256, 160, 112
BATCH, WORKERS, PREFETCH = 32, 2, 2
STEPS, WARM_UP, TURNS = 110, 10, 10
EXAMPLES, POSITION = 10_000_000, 9_000_000
CPU = torch.device("cpu")


class Pictures(Dataset[tuple[Tensor, int]]):
    """A dataset of JPEG files, decoded, cropped and mirrored, with a number as label."""

    folder: ClassVar[Path]

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.folder / f"{index}.jpg") as opened:
            picture = opened.convert("RGB").resize((128, 128))
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)
        left, top = torch.randint(0, 128 - CROP, (2,)).tolist()
        pixels = pixels[:, top : top + CROP, left : left + CROP]
        return (pixels.flip(2) if torch.rand(()) < 0.5 else pixels), index % 10


class Numbers(Dataset[tuple[Tensor, int]]):
    """A dataset so large that only the order of its examples takes time."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 8, 8, dtype=torch.uint8), index % 10


def network() -> nn.Module:
    """Return a network so small that both loops wait for data."""
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.LazyLinear(10))


class Labelled(Recipe):
    """The network on the JPEG files, which records the time of each forward pass."""

    name: ClassVar = "labelled"
    title: ClassVar = "Labelled"
    description: ClassVar = "For the benchmark."
    defaults: ClassVar = {"precision": "fp32"}
    data: ClassVar[type[Dataset[Any]]] = Pictures
    size: ClassVar[int] = CROP
    forwards: ClassVar[list[float]] = []

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        self.dataset = self.data()
        model = network()
        model(torch.zeros(1, 3, self.size, self.size))
        self.modules = {"model": model}
        self.optimizers = {"adam": torch.optim.Adam(model.parameters(), fused=True)}

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the cross-entropy."""
        self.forwards.append(time.perf_counter())
        pixels, labels = batch
        yield Loss(F.cross_entropy(self.modules["model"](pixels.float() / 255), labels), "adam")


class Small(Labelled):
    """The same small network with the ten million examples."""

    data: ClassVar[type[Dataset[Any]]] = Numbers
    size: ClassVar[int] = 8


def ours(recipe: type[Labelled], steps: int, folder: Path | None = None, **kwargs: Any) -> float:
    """Train with the service's loop, and return images per second after the warm-up."""
    Labelled.forwards.clear()
    values = {
        "training": {"steps": steps, "batch_size": BATCH},
        "data": {"workers": WORKERS, "prefetch": PREFETCH},
    }
    config = parse_config(recipe, values)
    ignore: Any = lambda _told: None  # noqa: E731
    train(
        prepare_run(
            recipe,
            config,
            device=CPU,
            on_steps=ignore,
            on_event=ignore,
            checkpoint_folder=folder,
            **kwargs,
        ),
        control=Control,
    )
    return _rate(Labelled.forwards)


def bare() -> float:
    """Train with a plain loop on a DataLoader, and return images per second after the warm-up."""
    torch.set_num_threads(1)
    model = network()
    model(torch.zeros(1, 3, CROP, CROP))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    forwards: list[float] = []
    loader = DataLoader(
        Pictures(),
        BATCH,
        sampler=torch.randint(FILES, (BATCH * STEPS,)).tolist(),
        num_workers=WORKERS,
        prefetch_factor=PREFETCH,
    )
    for pixels, labels in loader:
        forwards.append(time.perf_counter())
        optimizer.zero_grad()
        F.cross_entropy(model(pixels.float() / 255), labels).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return _rate(forwards)


def _rate(forwards: list[float]) -> float:
    if len(forwards) <= WARM_UP:
        return 0.0
    return BATCH * (len(forwards) - 1 - WARM_UP) / (forwards[-1] - forwards[WARM_UP])


def seconds_to_first_batch(folder: Path) -> float:
    """Resume within the ten million examples; return the seconds to the first forward pass."""
    ours(Small, 1, folder)
    path = folder / "step-00000001.pt"
    state = torch.load(path, weights_only=True)
    state["progress"]["position"] = POSITION
    torch.save(state, path)
    started = time.perf_counter()
    ours(Small, 2, resume=path)
    return Labelled.forwards[0] - started


def draw(folder: Path) -> None:
    """Write JPEG files of smooth colours with noise, similar to photographs."""
    random = np.random.default_rng(0)
    for index in range(FILES):
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + random.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{index}.jpg", quality=90)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        Pictures.folder = Path(name)
        draw(Pictures.folder)
        turns = []
        for number in range(TURNS):
            plain = bare() if number % 2 else 0.0  # each is the first in half of them
            own = ours(Labelled, STEPS)
            turns.append((own, plain or bare()))
        seconds = statistics.median(seconds_to_first_batch(Path(name)) for _ in range(3))
    share = statistics.median(own / plain for own, plain in turns)
    rates = [statistics.median(each) for each in zip(*turns, strict=True)]
    report(
        "data_loading",
        f"≥ {BAR_SHARE} of a bare DataLoader's images/s; first batch at example {POSITION:,} of "
        f"{EXAMPLES:,} in ≤ {BAR_SECONDS:g} s",
        ("ours, images/s", "bare DataLoader, images/s", "shares, by turns", "first batch, s"),
        [
            (
                *(f"{rate:.0f}" for rate in rates),
                ", ".join(f"{own / plain:.2f}" for own, plain in turns),
                f"{seconds:.2f}",
            )
        ],
        measured=f"{share:.2f}, {seconds:.2f} s",
        passed=share >= BAR_SHARE and seconds <= BAR_SECONDS,
    )


if __name__ == "__main__":
    main()
