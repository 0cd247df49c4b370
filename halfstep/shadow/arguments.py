"""Arguments of an operator in another precision. This module imports torch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.shadow.memory import SHADOW_DTYPES
from halfstep.shadow.operators import SOFTMAXES, Operator

IN_FP64 = {torch.float32: torch.float64}


def map_tensors(
    value: object, change: Callable[[Tensor], Tensor], dtypes: Mapping[torch.dtype, torch.dtype]
) -> Any:
    """Return arguments with changed tensors, and with other dtypes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(item, change, dtypes) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change, dtypes) for item in value)
    return dtypes.get(value, value) if isinstance(value, torch.dtype) else value


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in half precision in fp32, and any other as it is."""
    return tensor.to(SHADOW_DTYPES.get(tensor.dtype, tensor.dtype))


def in_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 in fp64, and any other as it is."""
    return tensor.to(IN_FP64.get(tensor.dtype, tensor.dtype))


def adapt(operator: Operator, args: tuple[object, ...]) -> tuple[object, ...]:
    """Return arguments with which another run changes nothing of the training."""
    if operator.statistics:
        args = tuple(
            arg.clone() if i in operator.statistics and isinstance(arg, Tensor) else arg
            for i, arg in enumerate(args)
        )
    return (*args[:2], False) if operator.name in SOFTMAXES and len(args) > 2 else args
