"""Dispatch modes under which both passes of a precision diff run. This module imports torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from halfstep.shadow.hidden_autocast import run_as_in_training

HALF = (torch.float16, torch.bfloat16)
#: Operations that only draw numbers. (Attention draws them inside of a kernel of its own.)
RANDOM = frozenset(
    f"{name}{suffix}"
    for name in (
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "native_dropout"),
        *("normal", "rand", "rand_like", "randn", "randn_like", "uniform"),
    )
    for suffix in ("", "_")
)


class EqualOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws equal random numbers in every dtype, and reports each tensor before it is overwritten.

    A random operation on half-precision tensors is computed on float32 tensors, and cast: some
    kernels use their random numbers in another order for another dtype.
    """

    def __init__(
        self, on_write: Callable[[Tensor], None], reference: torch.dtype | None = None
    ) -> None:
        """on_write: called with each tensor that an operation is about to change.

        reference: casts to half precision yield this dtype; None: they are left as they are.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_write, self._reference = on_write, reference
        #: By operation: positions and names of the arguments that it changes; whether it is random.
        self._kinds: dict[object, tuple[list[tuple[int, str]], bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: hiding `__torch_dispatch__` from dynamo takes longer than calling it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if (kind := self._kinds.get(func)) is None:
            kind = self._kinds[func] = _find_written(func), func.overloadpacket.__name__ in RANDOM
        written, is_random = kind
        for index, name in written:
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self._on_write(tensor)
        if self._reference and kwargs.get("dtype") in HALF:
            kwargs = kwargs | {"dtype": self._reference}
        if is_random:
            return _random(func, args, kwargs)
        return run_as_in_training(func, args, kwargs)


def _find_written(func: Any) -> list[tuple[int, str]]:
    """Return positions and names of the arguments that an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def _random(func: Any, args: Any, kwargs: dict[str, object]) -> object:
    """Call a random operation with float32 instead of any other floating dtype."""
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float32:
        return _cast(func(*args, **kwargs | {"dtype": torch.float32}), dtype)
    if not args or not _is_other_float(args[0]):
        return func(*args, **kwargs)
    first: Tensor = args[0]
    as_float = tree_map(lambda v: v.float() if _is_other_float(v) else v, (args, kwargs))
    result = func(*as_float[0], **as_float[1])
    if func._schema.is_mutable:
        return first.copy_(as_float[0][0])
    return _cast(result, first.dtype)


def _is_other_float(value: Any) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and value.dtype != torch.float32


def _cast(tree: object, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, tree
    )
