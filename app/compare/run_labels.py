"""Labels of runs side by side: the few settings that differ, else what their names do not share."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from app.html import formats
from halfstep import number_formats

#: Value of a setting that a run does not have.
MISSING = object()
#: Limit of characters of a setting's value in a label, and of a name that is kept whole.
LONG_VALUE = 18
#: Limit of settings in a label.
MOST_SETTINGS = 3

#: A setting's value of each run.
Values = list[Any]
Settings = Sequence[tuple[str, Values]]


def choose_settings(differing: Settings, names: Sequence[str]) -> list[tuple[str, Values]]:
    """Return the settings of the labels: those of training first, no more than make a difference.

    Empty if they would say less than the names.
    """
    usable = [
        (path, values)
        for path, values in sorted(differing, key=lambda row: _is_aside(row[0]))
        if MISSING not in values and max(map(len, _short(values))) <= LONG_VALUE
    ]
    chosen: list[tuple[str, Values]] = []
    for row in usable:
        if len(chosen) == MOST_SETTINGS or len(_combinations(chosen)) == len(names):
            break
        if len(_combinations([*chosen, row])) > len(_combinations(chosen)):
            chosen.append(row)
    is_unique = len(_combinations(chosen)) == len(names)
    return chosen if is_unique or len(set(names)) < len(names) else []


def label(ids: Sequence[int], names: Sequence[str], chosen: Settings) -> dict[int, str]:
    """Return labels by run id; of equal ones the run's number becomes a part."""
    rows = [_named(path, values) for path, values in chosen]
    short = [" · ".join(texts) for texts in zip(*rows, strict=True)] or _without_prefix(names)
    counts = Counter(short)
    return {
        run_id: text if counts[text] == 1 else f"{text} · {run_id}"
        for run_id, text in zip(ids, short, strict=True)
    }


def texts(values: Values) -> list[str]:
    """Format a setting's values."""
    return ["–" if value is MISSING else number_formats.setting(value) for value in values]


def _without_prefix(names: Sequence[str]) -> list[str]:
    """Leave out the words that long names begin with in common; what is left has a letter."""
    shortest = min(names, key=len)
    ends = [each.end() for each in re.finditer(r"[\s/_-]+|$", shortest)]
    ends = [end for end in ends if all(name.startswith(shortest[:end]) for name in names)]
    is_left = max(map(len, names)) <= LONG_VALUE or len(shortest) in ends
    for end in () if is_left else reversed(ends):
        if all(re.search(r"[^\W\d_]", name[end:]) for name in names):
            return [name[end:] for name in names]
    return list(names)


def _is_aside(path: str) -> bool:
    """Return whether a setting changes what is measured or kept, and not the training."""
    return path.startswith(("diagnosis.", "checkpoints.", "evaluation.", "lab.", "alerts."))


def _combinations(rows: Settings) -> set[tuple[str, ...]]:
    """Return the different values of settings together."""
    return set(zip(*(map(repr, values) for _path, values in rows), strict=True))


def _short(values: Values) -> list[str]:
    """Format values with four digits of a number."""
    return [
        number_formats.number(value) if isinstance(value, float) else text
        for value, text in zip(values, texts(values), strict=True)
    ]


def _named(path: str, values: Values) -> list[str]:
    """Format values for a label; all but words are no label without the name of their setting."""
    name = formats.setting_name(path).removesuffix(".enabled").replace("learning_rate", "lr")
    return [
        f"{'' if value else 'no '}{name}"
        if isinstance(value, bool)
        else text
        if isinstance(value, str)
        else f"{name} {text}"
        for value, text in zip(values, _short(values), strict=True)
    ]
