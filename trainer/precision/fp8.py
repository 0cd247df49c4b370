"""Linear layers in fp8 for precision fp8, by torchao.float8.

Inputs, weights and output gradients are scaled to the range of fp8 per tensor or per row
(training.fp8), cast, and multiplied; results are bf16. Everything else runs in bf16 by autocast,
and weights stay fp32. Scales are computed for each tensor, so there is no state to save.
Imports torchao.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from halfstep.run_config import ConfigError, RunConfig
from trainer.precision.module_names import chosen, named

#: Lowest compute capability with fp8: Ada, then Hopper.
CAPABILITY = (8, 9)
#: Tensor cores process fp8 numbers in units of 16 bytes.
MULTIPLE = 16
#: "yes" for tests: the same casts on a CPU, with products in fp32.
EMULATE = "HALFSTEP_EMULATE_FP8"
NAMES_SHOWN = 6


def set_fp8(modules: Mapping[str, nn.Module], config: RunConfig, device: torch.device) -> None:
    """Convert linear layers to fp8, except those in modules.fp32 and modules.bf16.

    Layers and weights stay the same objects. Layers of unsuitable sizes stay in bf16 and are listed
    in the run's log.  modules: the recipe's, not wrapped or compiled yet.
    Raises ConfigError for a device without fp8, or if no layer can be converted.
    """
    is_emulated = device.type == "cpu" and os.environ.get(EMULATE) == "yes"
    check_device(device, is_emulated=is_emulated)
    # Padded, because the inner size of weight gradients is the batch size, which may be any.
    scaling = replace(
        Float8LinearConfig.from_recipe_name(config.training.fp8),
        emulate=is_emulated,
        pad_inner_dim=not is_emulated,
    )
    linear = dict(_convertible(modules, config))
    unfit = {name for name, layer in linear.items() if not _fits(layer)}
    for name in linear.keys() - unfit:
        _convert(linear[name], scaling)
    names = ", ".join(_describe(name, linear[name]) for name in sorted(unfit)[:NAMES_SHOWN])
    if len(unfit) > NAMES_SHOWN:
        names += f" and {len(unfit) - NAMES_SHOWN:,} more"
    if len(unfit) == len(linear):
        reason = f", because sizes are not multiples of {MULTIPLE}: {names}" if names else ""
        raise ConfigError(
            f"precision is fp8, but no linear layer supports it{reason}; allowed: bf16"
        )
    if unfit:
        text = f"in bf16, because their sizes are not multiples of {MULTIPLE}: {names}"
        sys.stderr.write(f"Halfstep: these layers run {text}.\n")


def check_device(device: torch.device, *, is_emulated: bool) -> None:
    """Raise ConfigError for a device without fp8."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= CAPABILITY:
            return
        kind = f"{torch.cuda.get_device_name(device)} with {'.'.join(map(str, capability))}"
    elif is_emulated:
        return
    else:
        kind = f"a {device.type}"
    least = ".".join(map(str, CAPABILITY))
    raise ConfigError(
        f"precision is fp8, but the device is {kind}; allowed: CUDA of compute capability {least} "
        "or more"
    )


@torch.no_grad()
def ranges(layer: Float8Linear, kind: str, tensor: Tensor) -> Tensor:
    """Return (3,): the largest magnitude, and the numbers of underflowed and of nonzero elements.

    kind: the layer's cast: activation, weight or gradient.
    """
    scaling = layer.config
    cast = {
        "activation": scaling.cast_config_input,
        "weight": scaling.cast_config_weight,
        "gradient": scaling.cast_config_grad_output,
    }[kind]
    rows = tensor.detach().reshape(-1, tensor.shape[-1])  # (any, size of the reduction)
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


def _convertible(
    modules: Mapping[str, nn.Module], config: RunConfig
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers without other settings, each once, by name."""
    settings = config.modules
    others = {
        **chosen(modules, "modules.fp32", settings.fp32),
        **chosen(modules, "modules.bf16", settings.bf16),
    }
    left_out = {inner for module in others.values() for inner in module.modules()}
    seen = set(left_out)
    for name, module in named(modules):
        # Subclasses are left out: what they compute is unknown.
        if type(module) is nn.Linear and module not in seen:
            seen.add(module)
            yield name, module


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def _convert(layer: nn.Linear, scaling: Float8LinearConfig) -> None:
    """Convert a layer to torchao's class in place, so that recipes and hooks keep working."""
    [made] = convert_to_float8_training(nn.Sequential(layer), config=scaling)
    layer.__class__ = type(made)
    for name in vars(made).keys() - vars(layer).keys():
        vars(layer)[name] = vars(made)[name]


def _describe(name: str, layer: nn.Linear) -> str:
    return f"{name} ({layer.in_features} to {layer.out_features})"
