"""Tensors among the variables of a training loop. This module imports torch."""

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from halfstep.shadow.source_files import is_of_script

DEEPEST_FRAME, DEEPEST_VALUE, MOST_VALUES = 40, 3, 1000


def tensors_of_callers() -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the frames of the script that are under way, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(DEEPEST_FRAME):
        if frame is None:
            return
        if is_of_script(frame.f_code.co_filename):
            yield from _tensors(frame)
        frame = frame.f_back


def _tensors(frame: types.FrameType) -> Iterator[tuple[str, Tensor]]:
    """Yield a frame's tensors by name."""
    with variables_of(frame) as values:
        for count, (name, value) in enumerate(list(values.items())):
            if count == MOST_VALUES:
                return
            if not name.startswith("__"):
                yield from tensors_in(name, value)


@contextmanager
def variables_of(frame: types.FrameType) -> Iterator[dict[str, object]]:
    """Enter with a frame's variables, without extending the life of any object."""
    values = frame.f_locals
    is_copy = values is not frame.f_globals and sys.version_info < (3, 13)
    try:
        yield values
    finally:
        if is_copy and frame.f_code.co_flags & 1:  # CO_OPTIMIZED: a function's frame, not a class's
            values.clear()


def tensors_in(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, also in lists and dictionaries, other than parameters."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield name, value
    elif depth < DEEPEST_VALUE and isinstance(value, tuple | list) and len(value) <= MOST_VALUES:
        for index, item in enumerate(value):
            yield from tensors_in(f"{name}[{index}]", item, depth + 1)
    elif depth < DEEPEST_VALUE and isinstance(value, Mapping) and len(value) <= MOST_VALUES:
        for key, item in list(value.items()):
            yield from tensors_in(f"{name}[{key!r}]"[:100], item, depth + 1)
