"""Findings about initial weights: missing, unexpected and mismatched ones."""

from collections.abc import Iterator, Sequence

from halfstep.diagnosis.finding import Finding
from halfstep.telemetry.events import Weights

NAMES_SHOWN = 6


def find_partial_start(event: Weights | None) -> Iterator[Finding]:
    """Yield a finding if the initial weights fit only in part."""
    if not event:
        return
    kinds = (
        (event.missing, event.missing_count, "missing there and initialized by the recipe"),
        (
            event.mismatched,
            event.mismatched_count,
            "of another shape there and initialized by the recipe",
        ),
        (event.unexpected, event.unexpected_count, "not in the recipe"),
    )
    parts = [
        f"{count:,} are {text} ({_list_names(names, count)})"
        for names, count, text in kinds
        if count
    ]
    if parts:
        yield Finding(
            "The initial weights match only in part",
            f"{event.loaded:,} of the recipe's {event.count:,} weights are loaded from "
            f"{event.source}; {'; '.join(parts)}. This is expected for a new head; otherwise "
            "compare the names.",
            part="weights",
        )


def _list_names(names: Sequence[str], count: int) -> str:
    more = count - len(names[:NAMES_SHOWN])
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more else "")
