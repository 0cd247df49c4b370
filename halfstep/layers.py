"""Which layer's gradients are how large. The norms are the parameters' own, and free.

A layer is a module that has parameters of its own; its norm is the L2 norm over them.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Layers:
    """The layers that parameters are of, in forward order."""

    def __init__(self, parameters: Iterable[str]) -> None:
        """parameters: their names, "<layer>.<parameter>"."""
        owners = [name.rpartition(".")[0] for name in parameters]
        self.names = list(dict.fromkeys(owners))
        self._layer_of = np.array([self.names.index(owner) for owner in owners])  # (P,)

    def norms(self, norms: NDArray[np.floating]) -> list[list[float]]:
        """Return the norms of the layers in each step, of those of their parameters (steps, P)."""
        steps, layers = len(norms), len(self.names)
        places = self._layer_of + layers * np.arange(steps)[:, None]  # (steps, P)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(norms, dtype=np.float64)
            sums = np.bincount(places.ravel(), squares.ravel(), minlength=steps * layers)
        found: list[list[float]] = np.sqrt(sums).reshape(steps, layers).tolist()
        return found
