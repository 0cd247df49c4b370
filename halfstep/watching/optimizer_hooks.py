"""Removal of the hooks around optimizers' steps."""

import sys
from types import FrameType

from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle

_FILE = optimizer.__file__


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove hooks from torch and from the list; not in a step, where torch iterates over them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            return
        frame = frame.f_back
    while handles:
        handles.pop().remove()
