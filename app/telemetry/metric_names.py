"""Which of a run's metrics are shown: a page of those whose names have a text."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MaxLen
from fastapi import Depends, Query
from sqlalchemy.orm import Session

from app.http.parameters import Name, Text
from db.telemetry import latest_metrics
from db.telemetry.latest_metrics import NamesPage

#: Metrics of one answer: what a page shows, and charts draw.
MOST_SHOWN = 100
#: Of them, those that an address names: pinned ones.
MOST_NAMED = 50


@dataclass(frozen=True)
class Choice:
    """search: part of the names.  after: the last name of the page before.  named: shown too."""

    search: str = ""
    after: str = ""
    named: tuple[str, ...] = ()

    def names(self, session: Session, run_id: int) -> NamesPage:
        """Return the names that are shown of a run."""
        return latest_metrics.page_of_names(
            session,
            run_id,
            search=self.search,
            after=self.after,
            named=self.named,
            limit=MOST_SHOWN,
        )


#: The first page.
FIRST = Choice()


async def _choice(
    metric_search: Annotated[Text, Query(description="Only metrics whose names have this")] = "",
    metric_after: Annotated[Name, Query(description="`metrics_next` of the page before")] = "",
    metric: Annotated[
        list[Name], MaxLen(MOST_NAMED), Query(description="Metrics that are told in any case")
    ] = [],  # noqa: B006 - FastAPI copies it
) -> Choice:
    return Choice(metric_search.strip(), metric_after, tuple(metric))


Chosen = Annotated[Choice, Depends(_choice)]
