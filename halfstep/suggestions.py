"""Suggestions for names that are probably misspelled."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question that has the closest known name, or an empty text.

    prefix: precedes the suggested name.
    """
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{close[0]}? " if close else ""
