"""Channels last: convolution weights in the memory order that tensor cores read.

Inputs in another order are converted by the first convolution; later layers keep the order of its
weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def set_channels_last(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    """Convert the weights in place; parameters stay the same objects for the optimizers."""
    for module in modules.values():
        for parameter in module.parameters():
            if memory_format := FORMATS.get(parameter.dim()):
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
    for optimizer in optimizers.values():
        lay_out_as_weights(optimizer)  # e.g. Adagrad creates its state at once


def lay_out_as_weights(optimizer: Optimizer) -> None:
    """Convert an optimizer's state to the memory order of its weights.

    A fused optimizer processes both elementwise in memory order.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and _has_other_strides(value, parameter):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _has_other_strides(value: Tensor, parameter: Tensor) -> bool:
    return (
        value.layout == parameter.layout == torch.strided
        and value.shape == parameter.shape
        and value.stride() != parameter.stride()
    )
