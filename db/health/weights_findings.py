"""Findings about initial weights: missing, unexpected and mismatched ones."""

from collections.abc import Iterator
from typing import Any

from db.health.finding import Finding

NAMES_SHOWN = 6
#: The event's lists, and what they are.
KINDS = {
    "missing": "not in it, and as the recipe draws them",
    "mismatched": "of another shape there, and as the recipe draws them",
    "unexpected": "in it and nowhere in the recipe",
}


def started_in_part(found: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield what the spool's event of weights says, if they did not fit throughout."""
    if not found:
        return
    parts = [
        f"{found[f'{kind}_count']:,} are {what} ({_shown(found, kind)})"
        for kind, what in KINDS.items()
        if found[f"{kind}_count"]
    ]
    if parts:
        yield Finding(
            "The starting weights do not fit throughout",
            f"{found['loaded']:,} of the recipe's {found['count']:,} weights are those of "
            f"{found['source']}; {'; '.join(parts)}. So it should be where a head is new; where "
            "not, compare the names.",
            part="weights",
        )


def _shown(found: dict[str, Any], kind: str) -> str:
    names = found[kind][:NAMES_SHOWN]
    more = found[f"{kind}_count"] - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")
