"""Recipes that pause until a file exists, so that a test can act at a known step."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from halfstep.recipe import Loss
from trainer.recipes.digits import Digits
from trainer.recipes.mlp import MLP

#: A step, at least, while the gate is shut.
SECONDS = float(os.environ.get("HALFSTEP_TEST_STEP_SECONDS", "0.05"))


class Gated(Digits):
    """Digits, which is slow until the file in HALFSTEP_GATE exists."""

    name: ClassVar = "gated"
    title: ClassVar = "Gated digits"

    def batch(self, indices: Any, generator: Any) -> Any:
        """Return a batch, slowly while the gate is closed; record the time if a test needs it."""
        if trace := os.environ.get("HALFSTEP_TEST_TRACE"):
            with Path(trace).open("a") as file:
                file.write(f"{_told()} {time.monotonic()}\n")
        if not _is_open():
            time.sleep(SECONDS)
        return super().batch(indices, generator)


class GatedMLP(MLP):
    """Wide layers, of which each process makes one step until the gate file exists."""

    name: ClassVar = "gated_mlp"
    title: ClassVar = "Gated wide layers"
    has_made_one = False

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the loss, after the first step only if the gate is open."""
        while self.has_made_one and not _is_open():
            time.sleep(SECONDS)
        self.has_made_one = True
        yield from super().training_step(batch)


def _is_open() -> bool:
    return Path(os.environ["HALFSTEP_GATE"]).exists()


def _told() -> str:
    """Return run and attempt from the process's arguments."""
    folder, attempt = sys.argv[1:3]
    parts = Path(folder).parts
    return f"{parts[parts.index('runs') + 1]} {attempt}"
