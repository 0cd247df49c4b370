"""Suggestions for names that are probably misspelled."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is closest, or an empty text if none resembles it."""
    return next(iter(get_close_matches(name, list(known), n=1)), "")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question that has the closest known name, or an empty text.

    prefix: precedes the suggested name.
    """
    meant = closest(name, known)
    return f"did you mean {prefix}{meant}? " if meant else ""
