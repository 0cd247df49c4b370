"""Wrappers of the functions in which gradients are clipped. This module imports torch."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, cuda
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _has_foreach_support as has_foreach_support

from halfstep.watching.async_host_copy import is_capturing
from halfstep.watching.listener import Listener
from halfstep.watching.loop import Loop

CLIP = "_clip_grads_with_norm_"  # of torch.nn.utils.clip_grad
NORM = "_get_total_norm"  # of clip_grad, before a clip by norm
EXACT = (torch.float32, torch.float64)  # dtypes of gradients whose norms are not rounded
GROUP = "_group_tensors_by_device_and_dtype"  # of clip_grad: clip_grad_value_ calls it, too


def wrap_clips(listener: Listener, loop: Loop) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the name and the wrapper of each function of clip_grad that a clip calls."""
    guard = listener.guard
    clips, passes, evidence = loop.clips, loop.passes, loop.evidence
    clip, group = getattr(clip_grad, CLIP), getattr(clip_grad, GROUP)
    total = getattr(clip_grad, NORM)

    # The compiler traces these three: a graph may contain a clip.
    @functools.wraps(total)
    def norm(
        tensors: object,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> object:
        """Return torch's total norm, and pass on the norms that it consists of."""
        clips.norms = clips.total = None
        is_plain = norm_type == 2.0 and foreach is not False and not error_if_nonfinite
        if (
            torch.compiler.is_compiling()
            or not (listener.is_armed and is_plain and isinstance(tensors, list))
            or (cuda._initialized and is_capturing())
        ):
            result = total(tensors, norm_type, error_if_nonfinite, foreach)
            if listener.is_armed and norm_type == 2.0 and not torch.compiler.is_compiling():
                clips.total = result
            return result
        try:
            # As torch does for tensors of one kind. Norms of half precision are rounded.
            [((device, dtype), ([own], _))] = group([tensors]).items()
            if dtype in EXACT and has_foreach_support(own, device):
                norms = torch._foreach_norm(own, 2.0)
                result = torch.linalg.vector_norm(torch.stack(norms), 2.0)
                clips.norms, clips.total = (tensors, norms), result
                return result
        except Exception:  # torch raises it, too
            return total(tensors, norm_type, error_if_nonfinite, foreach)
        clips.total = total(tensors, norm_type, error_if_nonfinite, foreach)
        return clips.total

    @functools.wraps(clip)
    def wrapper(parameters: object, max_norm: object, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not listener.is_armed:
            return clip(parameters, max_norm, *args, **kwargs)
        if not isinstance(parameters, Tensor | list | tuple):
            return clip(parameters, max_norm, *args, **kwargs)
        if not (cuda._initialized and is_capturing()):
            guard.held += 1
            try:
                clips.clipping(parameters, max_norm, args[0] if args else None)
            except Exception as error:
                guard.handle_error(error)
            finally:
                guard.held -= 1
            if guard.is_due and not guard.held:
                guard.terminate()
        result = clip(parameters, max_norm, *args, **kwargs)
        if passes.plain is None:
            listener.call(clips.on_clip)
        if evidence.armed.left:
            listener.call(evidence.skips.has_clipped, loop.step)
        return result

    @functools.wraps(group)
    def groups(tensors: Any, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not listener.is_armed:
            return group(tensors, *args, **kwargs)
        if sys._getframe(1).f_code.co_name == "clip_grad_value_":
            listener.call(clips.clipping_values, tensors[0])
        return group(tensors, *args, **kwargs)

    yield NORM, norm
    yield CLIP, wrapper
    yield GROUP, groups
