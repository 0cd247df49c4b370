"""Which layer's gradients are how large, over time. The norms are the clip's own, and free.

A layer is a module that has parameters of its own; its norm is the L2 norm over them.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from halfstep.config import Diagnosis
from trainer.watched import WatchedOptimizer

MOST_SAMPLES = 2000  # of a run, however long: as many as a screen has columns


def layer_interval(steps: int, diagnosis: Diagnosis) -> int:
    """Return every how many steps to tell of the layers, 0: never."""
    wanted = diagnosis.layer_norms_every_steps
    return wanted and max(wanted, math.ceil(steps / MOST_SAMPLES))


class Layers:
    """The layers of all optimizers, in forward order."""

    def __init__(self, optimizers: Mapping[str, WatchedOptimizer]) -> None:
        owners = [
            name.rpartition(".")[0] for watched in optimizers.values() for name in watched.names
        ]
        self.names = list(dict.fromkeys(owners))
        self._layer_of = np.array([self.names.index(owner) for owner in owners])  # (P,)

    def norms(self, norms: NDArray[np.float32]) -> list[float]:
        """Return the norm of each layer, of those of its parameters (P,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(norms, dtype=np.float64)
            sums = np.bincount(self._layer_of, squares, minlength=len(self.names))
        return [float(norm) for norm in np.sqrt(sums)]
