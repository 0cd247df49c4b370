"""Activation checkpointing: recomputes activations of modules in the backward pass.

The recomputation is bit-identical: same random numbers, autocast state and buffers. torch does not
restore buffers: a BatchNorm would count its batch twice, a spectral norm would use another weight.
So the recomputation uses copies made before the forward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.run_config import RunConfig
from trainer.precision.module_names import chosen
from trainer.precision.module_precision import wrap_forward

Place: TypeAlias = tuple[nn.Module, str]  # of a buffer


def set_checkpoints(modules: Mapping[str, nn.Module], config: RunConfig) -> None:
    """Enable activation checkpointing for the modules in the configuration.

    modules: the recipe's, not wrapped or compiled yet.  Raises ConfigError for unknown names.
    """
    for module in chosen(modules, "modules.checkpointed", config.modules.checkpointed).values():
        keep_no_activations(module)


def keep_no_activations(module: nn.Module) -> None:
    """Make a module recompute its activations in the backward pass."""
    places = [(owner, name) for owner in module.modules() for name in owner._buffers]

    def forward_checkpointed(inner: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        call = partial(inner, **kwargs)
        if places:
            return _forward_with_buffers(places, call, *args)
        return checkpoint(call, *args, use_reentrant=False)

    wrap_forward(module, forward_checkpointed)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiler cannot trace it
def _forward_with_buffers(places: Sequence[Place], call: Callable[..., Any], *args: Any) -> Any:
    before = [_copy(owner._buffers[name]) for owner, name in places]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _buffers(places, before)

    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def _buffers(places: Sequence[Place], values: Sequence[Tensor | None]) -> Iterator[None]:
    """Temporarily replace the modules' buffers by copies of these values."""
    now = [owner._buffers[name] for owner, name in places]
    for (owner, name), value in zip(places, values, strict=True):
        owner._buffers[name] = _copy(value)
    try:
        yield
    finally:
        for (owner, name), own in zip(places, now, strict=True):
            owner._buffers[name] = own


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()
