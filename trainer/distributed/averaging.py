"""Whether DistributedDataParallel averages the gradients of a static graph.

It learns the graph from the first step. Where that step differentiates a gradient or goes backward
through a network twice (WGAN-GP does both), it learns wrongly, leaves gradients on their ranks, and
says nothing: each rank would train a model of its own.
"""

import numpy as np

from halfstep.recipe import RecipeError
from trainer.distributed.ranks import Ranks
from trainer.observers import Observer
from trainer.optimizers import WatchedOptimizer

#: The step that the graph is learnt from, and one that goes by what was learnt.
STEPS_COMPARED = 2


class AveragingCheck(Observer):
    """Ends a run whose ranks have unlike gradients. The host waits for the device in two steps."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps = 0

    def before_step(self, step: int) -> None:
        """Count the steps since this process began."""
        self._steps += 1

    def unscaled(self, optimizer: WatchedOptimizer) -> None:
        """Compare the norms of the gradients. Raises RecipeError if they were not averaged."""
        if self._steps > STEPS_COMPARED:
            return
        first, *others = self._ranks.gather(optimizer.gradient_norms().tolist())
        # Not to the last bit: the ranks may be devices of two kinds, which sum in other orders.
        if not all(np.allclose(first, each, rtol=1e-3, equal_nan=True) for each in others):
            raise RecipeError(
                "training.static_graph is on, and gradients are not averaged over the devices: "
                "training_step differentiates a gradient, or goes backward through a network "
                "twice; switch it off"
            )
