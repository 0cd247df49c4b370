"""Records of operators that ran in an armed step."""

import linecache
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from types import CodeType
from typing import Literal, TypeAlias

import torch

from halfstep.shadow.facts import Facts

Held: TypeAlias = Literal["weight", "buffer", ""]  # what a module holds a tensor as

SOURCE_CHARACTERS = 200
SMALLEST_SCALE = 8.0  # that a loop without a GradScaler multiplies its loss by
OUTSIDE = "outside"  # name of the operation that stands for a tensor made before the step


#: First words of statements with a body.
HEADERS = (b"for ", b"while ", b"with ", b"async ", b"if ")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator was called.

    line: of the innermost frame outside of torch.  caller: of the innermost frame of the script,
    if that is another one, as for a model from an installed package.
    code, instruction: of the innermost frame, from which `source` reads the expression.
    """

    file: str = ""
    line: int = 0
    code: CodeType | None = None
    instruction: int = 0
    caller_file: str = ""
    caller_line: int = 0

    def source(self) -> str:
        """Return the expression that called the operator, in one line; "" if it is unknown."""
        if self.code is None:
            return ""
        position = next(islice(_positions(self.code), self.instruction // 2, None), None)
        first, last, start, end = position or (self.line, self.line, None, None)
        if first is None or last is None or start is None or end is None:
            return linecache.getline(self.file, self.line).strip()[:SOURCE_CHARACTERS]
        lines = [linecache.getline(self.file, n).encode() for n in range(first, last + 1)]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        if lines[0].startswith(HEADERS):  # a statement with its body, as an iterator's next item
            lines = [lines[0].rstrip().removesuffix(b":")]
        text = b" ".join(line.strip() for line in lines).decode(errors="replace")
        return text[:SOURCE_CHARACTERS]


def _positions(code: CodeType) -> Iterator[tuple[int | None, int | None, int | None, int | None]]:
    """Yield where each instruction is in the source; nothing before Python 3.11."""
    positions = getattr(code, "co_positions", None)
    return iter(()) if positions is None else positions()


@dataclass(slots=True)
class Input:
    """A use of a tensor: the operations that wrote it before, and what is wrong in it."""

    writers: list["Operation"]
    facts: Facts | None


@dataclass(slots=True, eq=False)
class Operation:
    """An operator that ran, in the order of `number`. It holds no tensors."""

    number: int
    name: str  # of the operator: "mm"
    place: Place = field(default_factory=Place)
    module: str = ""
    node: str = ""  # of the backward pass: "MmBackward0"
    dtype: torch.dtype | None = None  # of its result
    inputs: list[Input] = field(default_factory=list)
    result: Facts | None = None
    power: float | None = 0  # of the loss scale in the result; see scale.py
    is_of_scale: bool = False  # a value that depends on it has led to the result
    has_infinite_argument: bool = False  # as of masked_fill(mask, -inf)
    has_nan_argument: bool = False  # a number of Python, as of a clip by a NaN
    is_tainted: bool = False  # something is wrong in its result, or in what led to it
    is_unknown: bool = False  # it could not be run again
    is_zero_drawn: bool = False  # at random, in half precision
    is_read: bool = False  # another operator has used its result
    is_first: bool = False  # half precision lost values here that were there before
    #: A value that an element-wise operator lost: its input, and what that is in fp32.
    sample: tuple[float, float] | None = None
    #: The largest value in fp64, if fp32 overflows here and nothing that came in was infinite.
    beyond_fp32: float | None = None
    #: Whether values are lost by its own range: in fp32 it would be finite from its actual inputs.
    is_own: bool | None = None
    #: Operations that wrote the input of which a rounding has made a lost or a flushed value.
    rounded: list["Operation"] = field(default_factory=list)
    own_error: float = 0.0  # by its rounding, relative to the result; of a step that measures it
    factor: float | None = None  # by which it has multiplied a single number
    multiplier: float | None = None  # a number of Python by which it has multiplied in place
    largest: float = 0.0  # of OUTSIDE: the largest element, if it is beyond those of usual data
    variable: str = ""  # of OUTSIDE: the name under which the loop holds it
    held_as: Held = ""  # of OUTSIDE
    carried: "Carried | None" = None  # of OUTSIDE
    kept: "Kept | None" = None  # of OUTSIDE
    #: The first operator that has led to it and whose result is in half precision.
    root: "Operation | None" = None

    def alone(self) -> "Operation":
        """Return it without the operators that led to it, to be kept beyond its step."""
        return replace(self, inputs=[], rounded=[], root=None)

    @property
    def loss_scale(self) -> float:
        """The power of 2 by which a loop without a GradScaler multiplies its loss here, else 1."""
        factor = self.factor or 1.0
        return factor if factor >= SMALLEST_SCALE and math.frexp(factor)[0] == 0.5 else 1.0

    @property
    def is_backward(self) -> bool:
        """Whether it ran in the backward pass."""
        return bool(self.node)


@dataclass(frozen=True, slots=True)
class Kept:
    """What an earlier step has computed from scaled gradients, and kept outside of gradients."""

    step: int
    scale: float
    origin: Operation


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor that outlived its step, and is far from its value in fp32."""

    step: int
    share: float  # distance, relative to the value in fp32
    root: Operation  # where half precision first rounded what it is made of
    maker: Operation


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that outlived the step in which it became nonfinite.

    origin: None if that step was not observed; `step` is then the first with a symptom.
    """

    step: int
    origin: Operation | None
