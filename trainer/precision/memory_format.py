"""Channels last: the weights of convolutions in the order that tensor cores read images in.

An input that is laid out otherwise is rearranged by the first convolution; what follows keeps the
order of its weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def set_channels_last(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    """Rearrange the weights in place; parameters stay the objects that optimizers know."""
    for module in modules.values():
        for parameter in module.parameters():
            if memory_format := FORMATS.get(parameter.dim()):
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
    for optimizer in optimizers.values():
        lay_out_as_weights(optimizer)  # of some it is there already: Adagrad makes its own at once


def lay_out_as_weights(optimizer: Optimizer) -> None:
    """Give an optimizer's state the order of its weights, in place of that in which it was saved.

    A fused optimizer goes through all of them side by side, as they lie in memory.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and _lies_otherwise(value, parameter):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _lies_otherwise(value: Tensor, parameter: Tensor) -> bool:
    return (
        value.layout == parameter.layout == torch.strided
        and value.shape == parameter.shape
        and value.stride() != parameter.stride()
    )
