"""Casts of weights that autocast keeps until its region is left. This module imports torch."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.shadow.operators import is_half, is_readable


@dataclass(slots=True)
class _Cast:
    storage: StorageWeakRef
    weight: "weakref.ref[Tensor]"
    address: int  # of the weight's values, which `.data = …` changes
    version: int


class WeightCasts:
    """Which weights the casts in autocast's cache are of, and whether they have changed since."""

    def __init__(self) -> None:
        self.is_in_region = False
        self._casts: dict[int, _Cast] = {}  # by storage

    def leave(self) -> None:
        """Note that autocast is left, which empties its cache."""
        self.is_in_region = False
        self._casts.clear()

    def add(self, weight: Tensor, cast: Tensor) -> None:
        """Keep a copy in another dtype, if autocast has made it to keep it."""
        if not (self.is_in_region and weight.is_leaf and weight.requires_grad and is_half(cast)):
            return
        # The loop's own copies are made with autocast on; for its own casts it is off.
        if is_readable(cast) and not torch.is_autocast_enabled(cast.device.type):
            storage = cast.untyped_storage()
            self._casts[storage._cdata] = _Cast(
                StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                weakref.ref(weight),
                weight.data_ptr(),
                weight._version,
            )

    def is_stale(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the cast of a weight that has changed since."""
        if not (self._casts and is_half(tensor) and is_readable(tensor)):
            return False
        cast = self._casts.get(tensor.untyped_storage()._cdata)
        if cast is None or cast.storage.expired():  # type: ignore[no-untyped-call]
            return False
        weight = cast.weight()
        return weight is not None and (weight.data_ptr(), weight._version) != (
            cast.address,
            cast.version,
        )
