"""Autocast within operators, from which a dispatch mode would keep it. This module imports torch.

What autocast changes is on its lists, and is changed before a mode sees it. But some operators call
listed ones: a bilinear product, or in inference mode whatever consists of others. torch runs what a
mode calls without autocast: their results would be fp32 where those of the training are half.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key

from halfstep.shadow.operators import tensors_in

#: Operators that call listed ones, with the function that calls them, which may be listed itself.
CALLING = {
    "aten::affine_grid_generator": "aten::affine_grid_generator",
    "aten::_trilinear": "aten::bilinear",
}
T = TypeVar("T")
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def run_as_in_training(
    function: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> T:
    """Run an operator with autocast within it, if it has that without a mode."""
    device = _find_device(function, args) if _calls_others(function) else ""
    if not device:
        return function(*args, **kwargs)
    torch.set_autocast_enabled(device, True)
    try:
        return function(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, False)


@cache
def _calls_others(function: Any) -> bool:
    is_composite = _dispatch_has_kernel_for_dispatch_key(
        function.name(), "CompositeImplicitAutograd"
    )
    return bool(is_composite or function._schema.name in CALLING)


def _find_device(function: Any, args: tuple[object, ...]) -> str:
    """Return the type of device whose autocast the operator has within; empty if none."""
    device = next((tensor.device.type for tensor in tensors_in(list(args))), "")
    caller = CALLING.get(function._schema.name, function.name())
    is_listed = device not in KEYS or _dispatch_has_kernel_for_dispatch_key(caller, KEYS[device])
    if is_listed:
        return ""
    # The state in which the loop has called it.
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return device if torch.is_autocast_enabled(device) else ""
