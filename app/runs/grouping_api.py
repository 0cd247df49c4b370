"""Runs by what they have in common."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db
from app.http.parameters import Name, Sort, Text
from app.runs import columns, filters, grouping
from app.runs.summary import Number
from db.errors import Invalid
from db.runs.grouping import GROUPED_BY, grouped
from db.runs.run_filters import SYNONYMS

router = APIRouter(prefix="/runs", tags=["runs"])


class Spread(BaseModel):
    """A figure of the runs of a group."""

    count: Annotated[int, Field(description="Runs that have a finite one: of these are the rest")]
    mean: float
    deviation: Annotated[float | None, Field(description="Of the sample; null of one run")]
    lowest: float
    highest: float


class RunGroup(BaseModel):
    """Runs that have a value in common."""

    value: Annotated[Number | str, Field(description="Null: runs that have none")]
    filter: Annotated[str | None, Field(description="That lists its runs; null if too long")]
    runs: int
    newest: Annotated[int, Field(description="Id of its newest run")]
    statuses: Annotated[dict[str, int], Field(description="By status or ending, how many are so")]
    figures: Annotated[dict[str, Spread], Field(description="By the names asked for")]


class GroupList(BaseModel):
    """total: of all groups, of which the first are told."""

    groups: list[RunGroup]
    total: int
    notes: Annotated[list[str], Field(description="Names that no setting or metric has")]


@router.get("/groups")
@requires(SIGNED_IN)
def list_groups(
    session: Db,
    principal: SignedIn,
    group: Annotated[
        Name, Query(min_length=1, description=f"{', '.join(GROUPED_BY)}, or the name of a setting")
    ],
    filter: Annotated[str, Query(description="As the list of runs takes it")] = "",  # noqa: A002
    sort: Annotated[
        Sort, Query(description="One of values, by its mean; runs; what is grouped by; or id")
    ] = "-id",
    values: Annotated[
        Text, Query(description="Numbers of the list, settings and metrics, with commas between")
    ] = "loss",
) -> GroupList:
    """Group runs, newest first if not told otherwise: the first 200 groups."""
    terms = filters.read(filter, me=principal.user.name)
    names = [each.sort for each in grouping.figures(columns.chosen(values))]
    sorted_by = sort.removeprefix("-")
    allowed = ("id", "runs", group, *names)
    if sorted_by not in allowed and SYNONYMS.get(sorted_by) not in allowed:
        text = f"{sort[:100]!r} is not allowed; allowed: {', '.join(allowed)}, downwards with -"
        raise Invalid({"sort": text})
    found = grouped(session, group, names=names, conditions=terms, sort=sort)
    return GroupList(
        groups=[
            RunGroup(
                value=each.value,
                filter=grouping.narrowed(filter, group, found.path, each.value),
                runs=each.runs,
                newest=each.newest,
                statuses=each.statuses,
                figures={name: Spread(**vars(told)) for name, told in each.spreads.items()},
            )
            for each in found.groups
        ],
        total=found.total,
        notes=[*grouping.notes(session, group), *filters.notes(session, terms, "-id")],
    )
