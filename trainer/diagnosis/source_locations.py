"""Source lines of a recipe's file in tracebacks and stacks."""

import sys
import traceback


def place(file: str, error: BaseException | None = None) -> str:
    """Return the innermost line of a file in a stack, as "mine.py:31"; "" if there is none.

    error: search its traceback; None: the current stack.
    """
    if error is None:
        frames = traceback.walk_stack(sys._getframe(1))  # innermost first
    else:
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    line = next((line for frame, line in frames if frame.f_code.co_filename == file), None)
    return "" if line is None else f"{file.rpartition('/')[2]}:{line}"


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
