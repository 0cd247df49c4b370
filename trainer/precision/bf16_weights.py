"""Weights in bf16, without masters, by training.weights: half the memory, at a price.

bf16 holds 8 bits, so that an update below a 512th of a weight or so rounds away, and does so again
in every step: trainer.diagnosis.lost_updates says how many do.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer


def set_bf16_weights(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Cast the weights in place; parameters stay the objects that optimizers know.

    Norms that keep running statistics stay in fp32, as these do: their kernels take no mixture.
    """
    for network in modules.values():
        for module in network.modules():
            if isinstance(module, _NormBase):
                continue
            for weight in module.parameters(recurse=False):
                if weight.dtype == torch.float32:
                    weight.data = weight.data.to(torch.bfloat16)
    for optimizer in optimizers.values():  # of some the moments are there already
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = value.to(parameter.dtype)
