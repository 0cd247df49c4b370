"""Gradient norms of layers, computed at no extra cost from the parameters' norms.

A layer is a module with parameters of its own; its norm is the L2 norm over them.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class Layers:
    """The layers that own the given parameters, in forward order."""

    def __init__(self, parameters: Iterable[str]) -> None:
        """parameters: their names, "<layer>.<parameter>"."""
        owners = [name.rpartition(".")[0] for name in parameters]
        self.names = list(dict.fromkeys(owners))
        self._layer_of = np.array([self.names.index(owner) for owner in owners])  # (P,)

    def norms(self, squares: Sequence[float] | NDArray[np.float64]) -> list[float]:
        """Return the layers' norms, from the squared norms of their parameters, (P,)."""
        sums = np.bincount(self._layer_of, squares, len(self.names))
        norms: list[float] = np.sqrt(sums).tolist()
        return norms
