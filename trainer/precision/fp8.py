"""Linear layers in fp8, by precision fp8: torchao.float8's, which train with its scales.

Inputs, weights and the gradients of outputs are scaled to fill fp8's range, tensor by tensor or row
by row (training.fp8), cast, and multiplied; what comes out is bf16. All else runs in bf16, by
autocast, and weights stay fp32. A scale is computed anew for each tensor: nothing is to be saved.
Imports torchao.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from halfstep.run_config import ConfigError, RunConfig
from trainer.precision.module_names import chosen, named

#: The first with fp8: Ada, then Hopper.
CAPABILITY = (8, 9)
#: Tensor cores take fp8 numbers in pieces of 16 bytes.
MULTIPLE = 16
#: For tests: the same casts on a CPU, whose products are those of fp32.
EMULATE = "HALFSTEP_EMULATE_FP8"
NAMES_SHOWN = 6


def set_fp8(modules: Mapping[str, nn.Module], config: RunConfig[Any], device: torch.device) -> None:
    """Have linear layers multiply in fp8, but for those in modules.fp32 and modules.bf16.

    They stay the objects that they are, and so do their weights. What has other sizes stays in
    bf16, and is named in the run's log.  modules: the recipe's, not wrapped or compiled yet.
    Raises ConfigError for a device without fp8, and where no layer can have it.
    """
    is_emulated = device.type == "cpu" and EMULATE in os.environ
    check_device(device, is_emulated=is_emulated)
    # Padded: of a gradient of weights the inner size is that of the batch, which may be any.
    scaling = replace(
        Float8LinearConfig.from_recipe_name(config.training.fp8),
        emulate=is_emulated,
        pad_inner_dim=not is_emulated,
    )
    linear = dict(_wanted(modules, config))
    unfit = {name for name, layer in linear.items() if not _fits(layer)}
    for name in linear.keys() - unfit:
        _convert(linear[name], scaling)
    told = ", ".join(_in_words(name, linear[name]) for name in sorted(unfit)[:NAMES_SHOWN])
    if len(unfit) > NAMES_SHOWN:
        told += f" and {len(unfit) - NAMES_SHOWN:,} more"
    if len(unfit) == len(linear):
        those = f", its sizes being no multiples of {MULTIPLE}: {told}" if told else ""
        raise ConfigError(
            f"precision is fp8, but no linear layer can have it{those}; allowed: bf16"
        )
    if unfit:
        text = f"in bf16, their sizes being no multiples of {MULTIPLE}: {told}"
        sys.stderr.write(f"Halfstep: these layers are not in fp8 but {text}.\n")


def check_device(device: torch.device, *, is_emulated: bool) -> None:
    """Raise ConfigError for one without fp8."""
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found >= CAPABILITY:
            return
        kind = f"{torch.cuda.get_device_name(device)} with {'.'.join(map(str, found))}"
    elif is_emulated:
        return
    else:
        kind = f"a {device.type}"
    least = ".".join(map(str, CAPABILITY))
    raise ConfigError(
        f"precision is fp8, and the device is {kind}; allowed: CUDA of compute capability {least} "
        "or more"
    )


@torch.no_grad()
def ranges(layer: Float8Linear, kind: str, tensor: Tensor) -> Tensor:
    """Return (3,): the largest magnitude, how many elements become 0 in fp8, how many are not 0.

    kind: as what the layer casts it, activation, weight or gradient.
    """
    scaling = layer.config
    cast = {
        "activation": scaling.cast_config_input,
        "weight": scaling.cast_config_weight,
        "gradient": scaling.cast_config_grad_output,
    }[kind]
    rows = tensor.detach().reshape(-1, tensor.shape[-1])  # (any, the size that is summed over)
    scale = tensor_to_scale(
        rows,
        cast.target_dtype,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=scaling.round_scales_to_power_of_2,
    )
    small = to_fp8_saturated(rows.float() * scale, cast.target_dtype)
    is_there = rows != 0
    is_lost = is_there & (small.float() == 0)
    return torch.stack([rows.abs().amax().float(), is_lost.sum().float(), is_there.sum().float()])


def _wanted(
    modules: Mapping[str, nn.Module], config: RunConfig[Any]
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that nobody wants otherwise, each once, by their names."""
    settings = config.modules
    others = {
        **chosen(modules, "modules.fp32", settings.fp32),
        **chosen(modules, "modules.bf16", settings.bf16),
    }
    left_out = {inner for module in others.values() for inner in module.modules()}
    seen = set(left_out)
    for name, module in named(modules):
        # Not of a class of its own: what such a one computes is not known.
        if type(module) is nn.Linear and module not in seen:
            seen.add(module)
            yield name, module


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def _convert(layer: nn.Linear, scaling: Float8LinearConfig) -> None:
    """Make a layer torchao's in place: recipes and hooks know it as an object, copies copy it."""
    [made] = convert_to_float8_training(nn.Sequential(layer), config=scaling)
    layer.__class__ = type(made)
    for name in vars(made).keys() - vars(layer).keys():
        vars(layer)[name] = vars(made)[name]


def _in_words(name: str, layer: nn.Linear) -> str:
    return f"{name} ({layer.in_features} to {layer.out_features})"
