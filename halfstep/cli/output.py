"""print() that ignores a closed pipe or a full disk."""

import os
import sys


def say(text: str) -> None:
    """Print a line. Neither a full disk nor a reader who has gone ends the command."""
    try:
        print(text, flush=True)  # noqa: T201 - for whoever started it
    except BrokenPipeError:  # from now on to nobody, as Python's own flush at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        return
