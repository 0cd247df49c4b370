"""Casts of weights that autocast keeps until its region is left. This module imports torch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.shadow.operations import Place
from halfstep.shadow.operators import is_half, is_readable

CAST = "ToCopyBackward0"


@dataclass(slots=True)
class _Cast:
    storage: StorageWeakRef
    address: int  # of the weight's values, which `.data = …` changes
    version: int  # of the weight
    is_equal: bool  # to the weight


class WeightCasts:
    """Whether the casts in autocast's cache still equal their weights."""

    def __init__(self, is_held: Callable[[Tensor], bool]) -> None:
        """is_held: whether the loop itself holds a tensor, which is then no cast of autocast's."""
        self.is_in_region = False
        self.region = Place()  # where the outermost region was entered, if that was seen
        self._is_held = is_held
        self._casts: dict[int, _Cast] = {}  # by storage

    def enter(self, region: Place) -> None:
        """Note that a region is entered whose casts are kept."""
        if not self.is_in_region:
            self.is_in_region, self.region = True, region

    def leave(self) -> None:
        """Note that autocast is left, which empties its cache."""
        self.is_in_region, self.region = False, Place()
        self._casts.clear()

    def add(self, weight: Tensor, cast: Tensor) -> None:
        """Keep a copy in another dtype, if autocast has made it to keep it."""
        if not (self.is_in_region and weight.is_leaf and weight.requires_grad and is_half(cast)):
            return
        # The loop's own copies are made with autocast on; for its own casts it is off.
        if is_readable(cast) and not torch.is_autocast_enabled(cast.device.type):
            self._keep(weight, cast, is_equal=True)

    def is_stale(self, tensor: Tensor) -> bool:
        """Return whether a tensor is autocast's cast of a weight that has other values now."""
        if not (self.is_in_region and is_half(tensor) and is_readable(tensor)):
            return False
        cast = tensor if tensor._base is None else tensor._base
        weight = _weight_of(cast)
        if weight is None:
            return False
        known = self._casts.get(cast.untyped_storage()._cdata)
        if known is not None and known.storage.expired():  # type: ignore[no-untyped-call]
            known = None
        if known is not None and (known.address, known.version) == (
            weight.data_ptr(),
            weight._version,
        ):
            return not known.is_equal
        if known is None and self._is_held(cast):
            return False
        current = weight.detach().to(cast.dtype)
        is_equal = torch.allclose(current, cast.detach(), rtol=0.0, atol=0.0, equal_nan=True)
        self._keep(weight, cast, is_equal=is_equal)
        return not is_equal

    def _keep(self, weight: Tensor, cast: Tensor, *, is_equal: bool) -> None:
        storage = cast.untyped_storage()
        self._casts[storage._cdata] = _Cast(
            StorageWeakRef(storage),  # type: ignore[no-untyped-call]
            weight.data_ptr(),
            weight._version,
            is_equal,
        )


def _weight_of(cast: Tensor) -> Tensor | None:
    """Return the leaf that autograd knows a tensor to be a cast of."""
    node = cast.grad_fn
    if node is None or node.name() != CAST:
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)
    return weight if isinstance(weight, Tensor) and weight.shape == cast.shape else None
