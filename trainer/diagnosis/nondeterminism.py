"""Operations that raise on CUDA with deterministic algorithms.

On a CPU they have deterministic kernels, so a check that passes there does not cover them.
Source: the documentation of `torch.use_deterministic_algorithms`. (interpolate has a deterministic
fallback for the modes bilinear and trilinear, and only the loss of images is affected, not that of
rows.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.shadow.hidden_autocast import run_as_in_training

#: ATen names and user-facing names of operations without a deterministic backward.
BACKWARD = {
    "avg_pool3d": "avg_pool3d",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "adaptive_max_pool2d": "adaptive_max_pool2d",
    "fractional_max_pool2d": "fractional_max_pool2d",
    "fractional_max_pool3d": "fractional_max_pool3d",
    "upsample_linear1d": 'interpolate(mode="linear")',
    "upsample_bicubic2d": 'interpolate(mode="bicubic")',
    "reflection_pad1d": 'pad(mode="reflect")',
    "reflection_pad2d": 'pad(mode="reflect")',
    "reflection_pad3d": 'pad(mode="reflect")',
    "_ctc_loss": "ctc_loss",
    "grid_sampler_2d": "grid_sample",
    "grid_sampler_3d": "grid_sample",
    "_embedding_bag": 'embedding_bag(mode="max")',
}
#: Operations without a deterministic forward.
FORWARD = {
    "max_unpool2d": "max_unpool",
    "max_unpool3d": "max_unpool",
    "nll_loss2d_forward": "nll_loss (or cross_entropy) of images",
    "put": "put_",
    "put_": "put_",
    "histc": "histc",
    "bincount": "bincount with weights",
    "median": "median along a dimension",
    "cumsum": "cumsum of floating-point numbers",
    "cumsum_": "cumsum of floating-point numbers",
    "scatter_reduce": 'scatter_reduce(reduce="prod")',
    "scatter_reduce_": 'scatter_reduce(reduce="prod")',
}
EMBEDDING_BAG_OF_MAXIMA = 2  # the mode's number


class Nondeterminism(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `on_found` with the name of each such operation while the context is active."""

    def __init__(self, on_found: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = on_found

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        leaves = tree_leaves([args, kwargs])
        if name in BACKWARD:
            is_trained = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
            is_other_bag = name == "_embedding_bag" and EMBEDDING_BAG_OF_MAXIMA not in args[4:5]
            if is_trained and torch.is_grad_enabled() and not is_other_bag:
                self._found(BACKWARD[name])
        elif name in FORWARD and _is_refused(name, func, args, kwargs, leaves):
            self._found(FORWARD[name])
        return run_as_in_training(func, args, kwargs)


def _is_refused(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[object]
) -> bool:
    if name.startswith("cumsum"):
        return bool(kwargs.get("dtype", args[0].dtype).is_floating_point)
    if name.startswith("scatter_reduce"):
        return "prod" in leaves
    if name == "bincount":
        return sum(isinstance(leaf, Tensor) for leaf in leaves) > 1
    if name == "median":
        return "dim" in str(func._overloadname)
    return True
