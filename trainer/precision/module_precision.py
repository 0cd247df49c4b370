"""Modules with a precision of their own, by modules.fp32 and modules.bf16.

    with torch.autocast(device, enabled=False):
        return forward(inputs.float())

is the usual code in a module's forward; this module wraps forward in the same way, with
bit-identical results. If the loop's own autocast is off (fp32, or a retry in fp32), nothing
changes.
"""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.run_config import RunConfig
from trainer.precision.module_names import chosen

HALF = (torch.float16, torch.bfloat16)


def set_precisions(
    modules: Mapping[str, nn.Module], config: RunConfig, device: torch.device
) -> None:
    """Make modules run in the precision that the configuration specifies.

    modules: the recipe's, not wrapped or compiled yet.  Raises ConfigError for unknown names.
    """
    settings = config.modules
    bf16 = chosen(modules, "modules.bf16", settings.bf16)
    fp32 = chosen(modules, "modules.fp32", settings.fp32)
    # In this order: for a module in both settings fp32 is the outer wrapper and disables bf16.
    if config.precision == "fp16":
        for module in bf16.values():
            run_in(torch.bfloat16, module, device.type)
    if config.precision != "fp32":
        for module in fp32.values():
            run_in(torch.float32, module, device.type)


def run_in(dtype: torch.dtype, module: nn.Module, device_type: str) -> None:
    """Make a module run in this dtype, float32 or bfloat16, wherever autocast is on."""

    def cast(value: object) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in HALF else value

    def forward_in(inner: Callable[..., object], *args: object, **kwargs: object) -> object:
        if not torch.is_autocast_enabled(device_type):
            return inner(*args, **kwargs)
        # Without the cache: it stores one cast per weight, and a tied weight may also be cast to
        # fp16.
        region = torch.autocast(
            device_type, torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False
        )
        with region:
            return inner(*tree_map(cast, args), **tree_map(cast, kwargs))

    wrap_forward(module, forward_in)


def wrap_forward(module: nn.Module, around: Callable[..., object]) -> None:
    """Wrap a module's forward: `around` gets the original forward and its arguments.

    Names, hooks and type are unchanged, and a copy of the module calls its own forward.
    """
    before: Any = vars(module).get("forward")
    inner: Callable[..., object]
    if isinstance(before, MethodType):
        inner = before.__func__
    elif before is not None:  # a plain function, which takes no module

        def inner(_self: nn.Module, *args: object, **kwargs: object) -> object:
            return before(*args, **kwargs)

    else:
        inner = type(module).forward

    @wraps(inner)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return around(partial(inner, self), *args, **kwargs)

    module.forward = MethodType(forward, module)
