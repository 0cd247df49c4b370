"""Selection of a run's metrics: a page of the names that match a search."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MaxLen
from fastapi import Depends, Query
from sqlalchemy.orm import Session

from app.http.parameters import Name, Text
from db.telemetry import latest_metrics
from db.telemetry.latest_metrics import NamesPage

#: Metrics in one response, as shown on a page and drawn in charts.
MOST_SHOWN = 100
#: Further metrics, which a URL names: those in view.
MOST_NAMED = 100


@dataclass(frozen=True)
class Choice:
    """Selection of metrics."""

    search: str = ""  # words that the names contain
    after: str = ""  # last name of the previous page
    limit: int = MOST_SHOWN  # names of a page
    named: tuple[str, ...] = ()  # always included

    def names(self, session: Session, run_id: int) -> NamesPage:
        """Return the selected names of a run."""
        return latest_metrics.page_of_names(
            session,
            [run_id],
            search=self.search,
            after=self.after,
            named=self.named,
            limit=self.limit,
        )


#: Selection of the first page.
FIRST = Choice()


NamedMetrics = Annotated[list[Name], MaxLen(MOST_NAMED), Query(description="Names of metrics")]


async def _choice(
    metric_search: Annotated[Text, Query(description="Words that the names contain")] = "",
    metric_after: Annotated[Name, Query(description="`metrics_next` of the previous page")] = "",
    metric_limit: Annotated[
        int, Query(ge=0, le=MOST_SHOWN, description="Metrics of a page, besides `metric`")
    ] = MOST_SHOWN,
    metric: Annotated[
        list[Name], MaxLen(MOST_NAMED), Query(description="Metrics to include in any case")
    ] = [],  # noqa: B006 - FastAPI copies it
) -> Choice:
    return Choice(metric_search.strip(), metric_after, metric_limit, tuple(metric))


Chosen = Annotated[Choice, Depends(_choice)]
