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

    def norms(self, norms: NDArray[np.float32]) -> list[float]:
        """Return the norm of each layer, of those of its parameters (P,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(norms, dtype=np.float64)
            sums = np.bincount(self._layer_of, squares, minlength=len(self.names))
        return [float(norm) for norm in np.sqrt(sums)]
