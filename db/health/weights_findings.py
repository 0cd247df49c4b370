"""Findings about initial weights: missing, unexpected and mismatched ones."""

from collections.abc import Iterator
from typing import Any

from db.health.finding import Finding

NAMES_SHOWN = 6
#: The event's lists with their descriptions.
KINDS = {
    "missing": "missing there and initialized by the recipe",
    "mismatched": "of another shape there and initialized by the recipe",
    "unexpected": "only there and not in the recipe",
}


def started_in_part(event: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield a finding if the initial weights fit only in part. event: the spool's event."""
    if not event:
        return
    parts = [
        f"{event[f'{kind}_count']:,} are {text} ({_shown(event, kind)})"
        for kind, text in KINDS.items()
        if event[f"{kind}_count"]
    ]
    if parts:
        yield Finding(
            "The initial weights fit only in part",
            f"{event['loaded']:,} of the recipe's {event['count']:,} weights are loaded from "
            f"{event['source']}; {'; '.join(parts)}. This is expected for a new head; otherwise "
            "compare the names.",
            part="weights",
        )


def _shown(event: dict[str, Any], kind: str) -> str:
    names = event[kind][:NAMES_SHOWN]
    more = event[f"{kind}_count"] - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")
