"""Route of grouped runs."""

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import Name, Sort, Text
from app.runs import columns, filters, grouping
from app.runs.summary import Number
from db.errors import Invalid
from db.runs.grouping import GROUPED_BY, group_runs
from db.runs.run_filters import SYNONYMS

router = Router(prefix="/runs", tags=["runs"])


class Spread(BaseModel):
    """Statistics of a number over the runs of a group."""

    count: Annotated[int, Field(description="Runs with a finite value; only these count")]
    mean: float
    deviation: Annotated[
        float | None, Field(description="Sample standard deviation; null for one run")
    ]
    lowest: float
    highest: float


class RunGroup(BaseModel):
    """Runs with the same value of the grouping setting or column."""

    value: Annotated[Number | str, Field(description="Null: runs without one")]
    filter: Annotated[str | None, Field(description="Filter of its runs; null if too long")]
    runs: int
    newest: Annotated[int, Field(description="Id of its newest run")]
    statuses: Annotated[dict[str, int], Field(description="Number of runs by status or outcome")]
    figures: Annotated[dict[str, Spread], Field(description="By requested name")]
    paired: Annotated[
        list[int],
        Field(
            description="Its runs if they share seeds and differ in a setting, for "
            "`comparison/parity`; else empty, as for more than 50 runs, and after 200 runs of all "
            "groups"
        ),
    ]


class GroupList(BaseModel):
    """The first groups."""

    groups: list[RunGroup]
    total: Annotated[int, Field(description="Number of all groups")]
    paired: Annotated[
        list[int],
        Field(
            description="Runs of all groups under the same conditions; empty if they are not "
            "grouped by precision or one setting"
        ),
    ]
    notes: Annotated[list[str], Field(description="Names that no setting or metric has")]


@router.get("/groups", SIGNED_IN)
def list_groups(
    session: Db,
    principal: SignedIn,
    group: Annotated[
        Name, Query(min_length=1, description=f"{', '.join(GROUPED_BY)}, or the name of a setting")
    ],
    filter: Annotated[str, Query(description="Same syntax as the list of runs")] = "",  # noqa: A002
    sort: Annotated[
        Sort,
        Query(description="A name in values (sorts by its mean), runs, the grouped name, or id"),
    ] = "-id",
    values: Annotated[
        Text, Query(description="Comma-separated number columns, settings and metrics")
    ] = "loss",
) -> GroupList:
    """Group runs, newest first by default: the first 200 groups."""
    terms = filters.read(filter, me=principal.user.name)
    names = [column.sort for column in grouping.figures(columns.chosen(values))]
    sorted_by = sort.removeprefix("-")
    allowed = ("id", "runs", group, *names)
    if sorted_by not in allowed and SYNONYMS.get(sorted_by) not in allowed:
        text = f"{sort[:100]!r} is not valid; allowed: {', '.join(allowed)}, descending with -"
        raise Invalid({"sort": text})
    result = group_runs(session, group, names=names, conditions=terms, sort=sort)
    paired = grouping.pair(session, result)
    return GroupList(
        groups=[
            RunGroup(
                value=row.value,
                filter=grouping.narrow(filter, group, result.path, row.value),
                runs=row.runs,
                newest=row.newest,
                statuses=row.statuses,
                figures={name: Spread(**vars(spread)) for name, spread in row.spreads.items()},
                paired=ids,
            )
            for row, ids in zip(result.groups, paired.of_groups, strict=True)
        ],
        total=result.total,
        paired=paired.of_all,
        notes=[*grouping.notes(session, group), *filters.notes(session, terms, "-id")],
    )
