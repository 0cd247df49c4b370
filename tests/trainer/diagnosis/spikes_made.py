"""Shared helpers of the tests of spikes."""

from typing import ClassVar

import torch

from tests.trainer.conftest import Regression

WINDOW = 16


class Poisoned(Regression):
    """A recipe with one example that multiplies its batch's loss and update by a thousand."""

    name: ClassVar = "poisoned"
    poison: ClassVar = {40}

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"].append(torch.nn.Dropout(0.1))  # whose draws go back as well

    def batch(self, indices, generator):
        inputs, targets = super().batch(indices, generator)
        factor = 60.0 if self.poison & set(indices.tolist()) else 1.0
        return inputs, targets * factor


#: Batches of 4 are sixteen to an epoch of 64 examples: the poison comes once in sixteen steps.
VALUES = {
    "training": {"steps": 60, "batch_size": 4, "seed": 3},
    "checkpoints": {"every_steps": 10},
    "spike": {"window_steps": WINDOW, "rollback": True, "check_every_steps": 4},
}
