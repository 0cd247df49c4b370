"""Tensors of numbers that half precision cannot hold, such as 1e10. This module imports torch.

`torch.tensor(1e10, dtype=torch.float16)` is infinite before any operator sees it. While a step is
armed, such a tensor is made in fp64 and cast, which has the same bits and is observed.
"""

from collections.abc import Callable
from functools import partial, wraps

import torch
from torch import Tensor

from halfstep.shadow.memory import SHADOW_DTYPES

MAKERS = ("tensor", "as_tensor")
LARGEST = 2**16  # elements


class NumberTensors:
    """Wrappers of the functions that make tensors of numbers, while they are installed."""

    def __init__(self, is_observed: Callable[[], bool]) -> None:
        self._is_observed = is_observed
        self._originals: dict[str, Callable[..., Tensor]] = {}

    def install(self) -> None:
        """Wrap the functions, unless they are."""
        for name in () if self._originals else MAKERS:
            original = self._originals[name] = getattr(torch, name)
            setattr(torch, name, wraps(original)(partial(self._make, original)))

    def remove(self) -> None:
        """Restore the functions."""
        for name, original in self._originals.items():
            setattr(torch, name, original)
        self._originals.clear()

    def _make(
        self, original: Callable[..., Tensor], data: object, *args: object, **kwargs: object
    ) -> Tensor:
        made = original(data, *args, **kwargs)
        is_half = made.dtype in SHADOW_DTYPES and not isinstance(data, Tensor)
        if not is_half or made.numel() > LARGEST or not self._is_observed():
            return made
        try:
            whole = original(data, dtype=torch.float64, device=made.device)
            is_lost = (made.isinf() & whole.isfinite()) | ((made == 0) & (whole != 0))
            if not bool(is_lost.any()):
                return made
            cast = whole.to(made.dtype)
            return cast.requires_grad_(made.requires_grad) if torch.equal(cast, made) else made
        except Exception:  # data that cannot be read twice
            return made
