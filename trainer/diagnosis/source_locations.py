"""Where in a recipe's own file something happens, for a person to look there."""

import sys
import traceback


def place(file: str, error: BaseException | None = None) -> str:
    """Return the innermost line of this file, as "mine.py:31"; "" if none is.

    error: of what led to it; without one, of what is being executed.
    """
    if error is None:
        frames = traceback.walk_stack(sys._getframe(1))  # the innermost first
    else:
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    line = next((line for frame, line in frames if frame.f_code.co_filename == file), None)
    return "" if line is None else f"{file.rpartition('/')[2]}:{line}"


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
