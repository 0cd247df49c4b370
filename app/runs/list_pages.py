"""The list of runs."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db, TheSettings
from app.html.rendering import page
from app.http.parameters import Name, RowId, RunId, Sort, Text
from app.live.run_updates import list_cursor
from app.runs import columns, filters, grouping
from app.runs.columns import BUILT_IN, NEWEST_FIRST, Column
from app.runs.summary import summarise_all
from app.telemetry import metric_direction
from app.trash.disk import disk
from db.queue import pending_reasons
from db.queue.pending_reasons import Queue
from db.runs import runs, trash, views
from db.runs.grouping import GROUPED_BY, Grouped, grouped
from db.runs.run_filters import Filter, InStatus, Term
from db.tables import ENDED, Run
from db.telemetry import series

router = APIRouter()

PAGE_SIZE = 50


@router.get("/runs")
@requires(SIGNED_IN)
def list_runs(
    request: Request,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
    typed: Annotated[str, Query(alias="filter")] = "",
    sort: Sort = NEWEST_FIRST,
    chosen: Annotated[Text, Query(alias="columns")] = "",
    group: Name = "",
    before: RunId | None = None,
    ended: RowId = 0,
    deleted: RowId | None = None,
) -> HTMLResponse:
    """Show the runs, newest first; filter, order and columns are in the address.

    A filter that cannot be understood is marked, and nothing is listed.
    group: what they are grouped by, if anything; the groups have the columns that hold numbers.
    ended: how many of those that were to be cancelled had ended already.  deleted: a run that was
    deleted just now.
    """
    shown = columns.chosen(chosen)
    sort = sort or NEWEST_FIRST
    terms: Filter = ()
    mistakes: list[filters.Mistake] = []
    try:
        terms = filters.read(typed, me=principal.user.name)
    except filters.BadFilter as error:
        mistakes = error.mistakes
    rows: list[tuple[Run, str]] = []
    total, followed = 0, rows
    if group and not mistakes:
        total = runs.count(session, terms)
        # Of the runs of all groups, those that a live page can follow.
        unended = [*terms, Term(InStatus(ENDED), is_negated=True)]
        followed = runs.newest(session, conditions=unended, limit=PAGE_SIZE)
    elif not mistakes:
        rows, total = runs.newest_and_count(
            session, conditions=terms, sort=sort, before=before, limit=PAGE_SIZE
        )
        followed = rows
    (newest, moment, binned), queue = trash.newest_and_contents(session), Queue.read(session)
    marks = pending_reasons.marks([run for run, _owner in followed], queue, moment)
    lines = series.sparklines(session, [run for run, _owner in rows])
    values = columns.values(session, [run.id for run, _owner in rows], shown)
    present = {"filter": typed, "sort": sort, "columns": columns.address(shown), "before": before}
    present["group"] = group
    figures = grouping.figures(shown)
    names = [column.sort for column in figures]
    found = Grouped([], 0, "")
    if group and not mistakes:
        found = grouped(session, group, names=names, conditions=terms, sort=sort)

    def at(**changes: object) -> str:
        """Return the address of the list with something otherwise."""
        return columns.list_address(**(present | changes))

    return page(
        request,
        "runs/runs.html",
        status_code=422 if mistakes else 200,
        principal=principal,
        rows=[
            (summary, lines[summary.id], values[summary.id])
            for summary in summarise_all(session, rows, settings, queue)
        ],
        older=rows[-1][0].id if len(rows) == PAGE_SIZE else None,
        newest=newest,
        cursor=list_cursor(newest, marks, is_worker_up=queue.has_takers),
        is_worker_up=queue.has_takers,
        filter=typed,
        mistakes=mistakes,
        notes=[] if mistakes else _notes(session, terms, sort, group, shown),
        total=total,
        sort=sort,
        columns=shown,
        others=[each for each in BUILT_IN.values() if each not in shown],
        chosen=columns.address(shown),
        destinations=principal.destinations(queue.usage.shares),
        group=group,
        groups=found,
        narrowed_filters=[
            grouping.narrowed(typed, group, found.path, each.value) for each in found.groups
        ],
        figures=figures,
        best={name: metric_direction.lowest(name, []) for name in names},
        grouped_by=GROUPED_BY,
        at=at,
        address_of=columns.list_address,
        views=views.listed(session, principal.user),
        before=before,
        ended=ended,
        deleted=trash.restorable(session, deleted),
        days=settings.trash_days,
        bin=binned,
        disk=disk(settings),
    )


def _notes(
    session: Session, terms: Filter, sort: str, group: str, shown: Iterable[Column]
) -> list[str]:
    own = [each.name for each in shown if each.is_own]
    if not group:
        return filters.notes(session, terms, sort, own)
    return [*grouping.notes(session, group), *filters.notes(session, terms, NEWEST_FIRST, own)]
