"""Modules that run in a precision of their own, by modules.fp32 and modules.bf16.

    with torch.autocast(device, enabled=False):
        return forward(inputs.float())

is what a person would write into the module's forward, to the last bit, and what is put round it
here. Where the loop's own region is off, in fp32 and in a retry in fp32, nothing is different.
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
    modules: Mapping[str, nn.Module], config: RunConfig[Any], device: torch.device
) -> None:
    """Have each module run in the precision that the configuration gives it.

    modules: the recipe's, not wrapped or compiled yet.  Raises ConfigError for unknown names.
    """
    settings = config.modules
    bf16 = chosen(modules, "modules.bf16", settings.bf16)
    fp32 = chosen(modules, "modules.fp32", settings.fp32)
    # In this order: of a module that both name, fp32 is outermost, and bf16 finds autocast off.
    if config.precision == "fp16":
        for module in bf16.values():
            run_in(torch.bfloat16, module, device.type)
    if config.precision != "fp32":
        for module in fp32.values():
            run_in(torch.float32, module, device.type)


def run_in(dtype: torch.dtype, module: nn.Module, device_type: str) -> None:
    """Have a module run in this type wherever autocast is on: float32, or bfloat16."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in HALF else value

    def forward_in(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device_type):
            return inner(*args, **kwargs)
        # Without the cache: it has one cast of a weight, and a tied one may be cast to fp16, too.
        region = torch.autocast(
            device_type, torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False
        )
        with region:
            return inner(*tree_map(cast, args), **tree_map(cast, kwargs))

    wrap_forward(module, forward_in)


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Put a function round a module's forward; it gets that first, then what forward gets.

    Names, hooks and type stay, and a copy of the module calls its own.
    """
    before: Any = vars(module).get("forward")
    inner: Callable[..., Any]
    if isinstance(before, MethodType):
        inner = before.__func__
    elif before is not None:  # somebody's plain function, which has no module to be given

        def inner(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs)

    else:
        inner = type(module).forward

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(inner, self), *args, **kwargs)

    module.forward = MethodType(forward, module)
