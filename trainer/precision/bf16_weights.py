"""Weights in bf16 without fp32 masters, by training.weights: halves the memory.

bf16 has 8 bits of precision, so an update below about 1/512 of a weight is lost to rounding, in
every step again: trainer.diagnosis.lost_updates counts these.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer


def set_bf16_weights(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Cast the weights in place; parameters stay the same objects for the optimizers.

    Norms with running statistics stay in fp32 like those: their kernels need one dtype.
    """
    for network in modules.values():
        for module in network.modules():
            if isinstance(module, _NormBase):
                continue
            for weight in module.parameters(recurse=False):
                if weight.dtype == torch.float32:
                    weight.data = weight.data.to(torch.bfloat16)
    for optimizer in optimizers.values():  # some have already created their moments
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = value.to(parameter.dtype)
