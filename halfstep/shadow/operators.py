"""Rules of the sanitizer for each operator. This module imports torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.shadow.memory import SHADOW_DTYPES

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
#: Operators that change running statistics without saying so in their schema, with the positions
#: of these arguments.
RUNNING_STATISTICS = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
    "batch_norm_update_stats": (1, 2),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}
#: Results that are memory without values.
UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
#: Only these results count: _ctc_loss leaves a part of its second one unwritten.
RESULTS = {"_ctc_loss": 1}
#: Softmax with a half input and an fp32 result: a shadow is fp32 already.
SOFTMAXES = frozenset({"_softmax", "_log_softmax"})
#: Recurrent kernels of a GPU that read all weights as one buffer of the actual dtype.
OPAQUE = frozenset({"_cudnn_rnn", "miopen_rnn"})
NAMESPACES = frozenset({"aten", "prims"})
#: Operators in which a difference or a bound becomes 0, whatever their inputs are.
DIFFERENCES = frozenset({"add", "sub", "rsub", "clamp", "clamp_min", "add_", "sub_"})
#: Operators that draw numbers from 0 on.
DRAWS = frozenset({"uniform_", "uniform", "rand", "rand_like"})
#: Operators whose last input is a divisor: only if it is 0 do they make an infinity.
DIVISIONS = frozenset({"div", "div_", "addcdiv", "addcdiv_"})
#: Operators that take rows of their first argument, which may be a whole data set.
SELECTIONS = frozenset({"index", "index_select", "gather", "embedding", "take", "masked_select"})
PRODUCTS_OF_TWO = frozenset({"mul", "mul_"})
DIVIDING = frozenset({"div_", "_foreach_div_"})
MULTIPLYING = DIVIDING | {"mul_", "_foreach_mul_"}  # in place
CLEARING = frozenset({"zero_", "_foreach_zero_"})
#: Operators that move values, or only change their sign.
MOVES = frozenset(
    {
        *("_to_copy", "clone", "copy_", "neg", "cat", "stack", "index", "index_select", "gather"),
        *("where", "masked_select", "flip", "roll", "repeat"),
    }
)
#: Operators that find the elements that are 0, if they compare with it.
ZERO_TESTS = frozenset({"eq", "ne"})
#: Operators that read a number of a result; nothing of them is run again.
READS = frozenset({"_local_scalar_dense", "is_same_size", "equal", "set_"})


@dataclass(frozen=True, slots=True)
class Operator:
    """Properties of an operator, from its schema and the table of exceptions."""

    name: str
    written: tuple[tuple[int, str], ...]  # positions and names of the arguments that it changes
    is_view: bool
    is_random: bool
    is_known: bool  # of torch itself and not opaque, nor a custom operator or a collective
    statistics: tuple[int, ...]  # positions of running statistics that it changes
    is_foreach: bool  # changes a list of tensors, each with a version

    def find_written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that a call changes in place."""
        found: list[Tensor] = []
        for index, name in self.written:
            found += tensors_in(kwargs.get(name) if name in kwargs else args[index : index + 1])
        return found

    def draws(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Return whether a call draws random numbers; attention does only with dropout."""
        if not self.is_random:
            return False
        if "attention" not in self.name:
            return True
        position = args[3] if len(args) > 3 and isinstance(args[3], float) else 0.0
        return bool(kwargs.get("dropout_p", position))


@cache
def operator_of(function: Any) -> Operator:
    """Return the properties of an overload."""
    schema = function._schema
    namespace, _, name = schema.name.partition("::")
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    return Operator(
        name=name,
        written=written,
        is_view=not written and any(result.alias_info for result in schema.returns),
        is_random=torch.Tag.nondeterministic_seeded in function.tags,
        is_known=namespace in NAMESPACES and name not in OPAQUE,
        statistics=RUNNING_STATISTICS.get(name, ()),
        is_foreach=bool(written) and name.startswith("_foreach_"),
    )


def has_opaque_state(operator: Operator, tensors: Iterable[Tensor]) -> bool:
    """Return whether a backward operator gets bytes that its forward one has left.

    They have the layout of the actual dtype, as in mkldnn_rnn_layer_backward: to read them in fp32
    is to read beyond their end.
    """
    is_backward = operator.name.endswith("_backward")
    return is_backward and any(tensor.dtype is torch.uint8 for tensor in tensors)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an operator's argument or result."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor has memory with its values.

    Not if it is a subclass, sparse, on the meta device, a zero of forward-mode differentiation, or
    sharded and freed.
    """
    if (
        type(tensor) not in PLAIN
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor._is_zerotensor()
    ):
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, Tensor) else tensor


def has_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor can hold NaN and infinities."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_half(value: object) -> bool:
    """Return whether an argument is a half-precision tensor or dtype."""
    if isinstance(value, Tensor):
        return value.dtype in SHADOW_DTYPES
    return isinstance(value, torch.dtype) and value in SHADOW_DTYPES
