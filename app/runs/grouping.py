"""Columns of the grouped list of runs, the filter of each group, and runs that share seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from app.compare.comparison import MOST_RUNS, settings_of
from app.compare.parity import PRECISION, group_settings, shares_seeds
from app.http.parameters import TYPED_CHARACTERS
from app.runs.columns import Column
from app.runs.filters import quote
from db.runs import autocomplete, runs
from db.runs.grouping import GROUPED_BY, SWEEP, Grouped
from db.runs.run_filters import NUMBERS, SETTINGS, SHORT_NAMES

#: Runs of a list whose settings are read to find those that share seeds.
MOST_READ = 200
#: Two seeds in two groups.
LEAST_PAIRED = 4


@dataclass(frozen=True)
class Paired:
    """Runs whose parity can be tested: they share seeds and differ in a setting."""

    of_groups: list[list[int]]  # ids of each group's runs; empty if it has no such runs
    of_all: list[int]  # of all groups together, likewise; empty if parity cannot compare these


def pair(session: Session, found: Grouped) -> Paired:
    """Return the runs of each group, and of all groups, whose parity can be tested.

    Groups of more runs than a comparison are left out, and those after MOST_READ runs.
    """
    sets = [
        group.ids if LEAST_PAIRED <= len(group.ids) <= MOST_RUNS else [] for group in found.groups
    ]
    everything = sorted({run_id for group in found.groups for run_id in group.ids})
    is_whole = len(found.groups) == found.total and all(group.ids for group in found.groups)
    if not is_whole or not LEAST_PAIRED <= len(everything) <= MOST_RUNS or found.total < 2:
        everything = []
    needed = set(everything)
    for index, ids in enumerate(sets):
        if len(needed | set(ids)) > MOST_READ:
            sets[index] = []
        needed |= set(sets[index])
    by_id = {run.id: run for run in runs.with_settings(session, needed)} if needed else {}
    settings = [settings_of([by_id[run_id] for run_id in ids]) for ids in (*sets, everything)]
    *of_groups, of_all = (
        ids if shares_seeds(own) else []
        for ids, own in zip((*sets, everything), settings, strict=True)
    )
    is_setting = found.path == PRECISION or found.path not in GROUPED_BY
    is_compared = is_setting and found.path in group_settings(settings[-1])
    return Paired(of_groups, of_all if is_compared else [])


def figures(shown: Sequence[Column], by: str = "") -> list[Column]:
    """Return the columns that hold numbers, except that of `by`: a group shows their means."""
    return [
        column
        for column in shown
        if (column.is_own and column.name not in (by, SHORT_NAMES.get(by)))
        or (column.sort in NUMBERS and column.name != "created")
    ]


def notes(session: Session, by: str) -> list[str]:
    """Return a note if runs cannot be grouped by this name."""
    if by in GROUPED_BY or not autocomplete.find_unknown(session, [by]):
        return []
    return [f"there is no setting {by}; runs are grouped by settings and {', '.join(GROUPED_BY)}"]


def narrow(filter_text: str, by: str, path: str, value: float | str | None) -> str | None:
    """Return the filter of a group's runs, None if it would be too long to be one.

    path: path of the setting, if there is only one.
    """
    setting = path if "." in path else SETTINGS + path  # a column or a metric may have its name
    if value is None:
        word = f"-has:{quote(by if by in GROUPED_BY else setting)}"
    elif by == SWEEP:
        word = f"sweep:{value:g}"
    elif by in GROUPED_BY:
        word = f"{by}:{quote(str(value))}"
    else:
        number = f"{value:.17g}" if isinstance(value, float) else quote(value)
        word = f"{quote(setting)}={number}"
    text = f"{filter_text} {word}".strip()
    return text if len(text) <= TYPED_CHARACTERS else None
