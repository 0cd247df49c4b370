"""The list of runs."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from app import columns, filters
from app.auth import SignedIn
from app.columns import BUILT_IN, NEWEST_FIRST
from app.context import Db, TheSettings
from app.disk import disk
from app.news import list_cursor
from app.parameters import RowId, RunId, Sort, Text
from app.rendering import page
from app.summary import summarise_all
from db import run_bin, runs, series, views, waiting
from db.conditions import Filter
from db.waiting import Queue

router = APIRouter()

PAGE_SIZE = 50


@router.get("/runs")
def list_runs(
    request: Request,
    session: Db,
    settings: TheSettings,
    visitor: SignedIn,
    typed: Annotated[str, Query(alias="filter")] = "",
    sort: Sort = NEWEST_FIRST,
    chosen: Annotated[Text, Query(alias="columns")] = "",
    before: RunId | None = None,
    ended: RowId = 0,
    deleted: RowId | None = None,
) -> HTMLResponse:
    """Show the runs, newest first; filter, order and columns are in the address.

    A filter that cannot be understood is marked, and nothing is listed.
    ended: how many of those that were to be cancelled had ended already.  deleted: a run that was
    deleted just now.
    """
    shown = columns.chosen(chosen)
    sort = sort or NEWEST_FIRST
    terms: Filter = ()
    mistakes: list[filters.Mistake] = []
    try:
        terms = filters.read(typed, me=visitor.user.name)
    except filters.BadFilter as error:
        mistakes = error.mistakes
    rows = (
        []
        if mistakes
        else runs.newest(session, conditions=terms, sort=sort, before=before, limit=PAGE_SIZE)
    )
    (newest, moment), queue = runs.newest_and_now(session), Queue.read(session)
    marks = waiting.marks([run for run, _owner in rows], queue, moment)
    lines = series.sparklines(session, [run for run, _owner in rows])
    values = columns.values(session, [run.id for run, _owner in rows], shown)
    present = {"filter": typed, "sort": sort, "columns": columns.address(shown), "before": before}

    def at(**changes: object) -> str:
        """Return the address of the list with something otherwise."""
        return columns.list_address(**(present | changes))

    return page(
        request,
        "runs.html",
        status_code=422 if mistakes else 200,
        visitor=visitor,
        rows=[
            (summary, lines[summary.id], values[summary.id])
            for summary in summarise_all(session, rows, settings, queue, moment)
        ],
        older=rows[-1][0].id if len(rows) == PAGE_SIZE else None,
        newest=newest,
        cursor=list_cursor(newest, marks, is_worker_up=bool(queue.workers)),
        is_worker_up=bool(queue.workers),
        filter=typed,
        mistakes=mistakes,
        notes=[] if mistakes else filters.notes(session, terms, sort),
        total=0 if mistakes else runs.count(session, terms),
        sort=sort,
        columns=shown,
        others=[each for each in BUILT_IN.values() if each not in shown],
        chosen=columns.address(shown),
        at=at,
        address_of=columns.list_address,
        views=views.listed(session, visitor.user),
        before=before,
        ended=ended,
        deleted=run_bin.restorable(session, deleted),
        days=settings.bin_days,
        bin=run_bin.contents(session),
        disk=disk(settings),
    )
