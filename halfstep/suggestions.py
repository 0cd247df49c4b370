"""Suggestions for names that are probably misspelled."""

from collections.abc import Iterable
from difflib import get_close_matches

#: Names that scripts give to settings.
SHORT_NAMES = {"lr": "learning_rate", "bs": "batch_size"}


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is closest, or an empty text if none resembles it.

    Of a path the last part decides, if another path has the same.
    """
    known, (_, _, last) = list(known), name.rpartition(".")
    ends = {path.rpartition(".")[2]: path for path in reversed(known)}
    if name not in known and (path := ends.get(SHORT_NAMES.get(last, last))):
        return path
    return next(iter(get_close_matches(name, known, n=1)), "")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question that has the closest known name, or an empty text.

    prefix: precedes the suggested name.
    """
    meant = closest(name, known)
    return f"did you mean {prefix}{meant}? " if meant else ""
