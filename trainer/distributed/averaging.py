"""Checks that DistributedDataParallel averages the gradients of a static graph.

It records the graph in the first step. If that step differentiates a gradient or runs a network's
backward pass twice (WGAN-GP does both), the recorded graph is wrong, and gradients silently are not
averaged: each rank would train a different model.
"""

import numpy as np
import torch
from torch import Tensor

from halfstep.recipe import RecipeError
from trainer.distributed.ranks import Ranks
from trainer.observers import Observer
from trainer.optimizers import WatchedOptimizer

#: The step that records the graph, and one that uses it.
STEPS_COMPARED = 2


class AveragingCheck(Observer):
    """Ends a run whose ranks have different gradients.

    The host waits for the device in two steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps = 0

    def before_step(self, step: int) -> None:
        """Count the steps since this process began."""
        self._steps += 1

    def before_clip(self, optimizer: WatchedOptimizer, factor: Tensor) -> None:
        """Compare the gradient norms. Raises RecipeError if they were not averaged."""
        if self._steps > STEPS_COMPARED:
            return
        first, *others = self._ranks.gather(torch.stack(list(optimizer.gradient_norms())).tolist())
        # Not bit-exactly: ranks on different kinds of devices sum in different orders.
        if not all(np.allclose(first, other, rtol=1e-3, equal_nan=True) for other in others):
            raise RecipeError(
                "training.static_graph is on, but gradients are not averaged over the devices: "
                "training_step differentiates a gradient or runs backward through a network twice; "
                "set training.static_graph to False"
            )
