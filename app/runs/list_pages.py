"""The list of runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.html.rendering import Context
from app.http.parameters import Name, RowId, RunId, Sort, Text
from app.http.path_prefix import public_address
from app.live.run_updates import list_cursor
from app.runs import columns, filters, grouping, list_facts, view_tabs
from app.runs.chart_preferences_api import SEVERAL_RUNS, preferences
from app.runs.columns import ACTIVE_FIRST, BUILT_IN, CHARTS, NEWEST_FIRST, TABLE, Column
from app.runs.summary import summarise_all
from app.telemetry import metric_direction
from app.trash.disk import disk
from db.health.scaling_health import has_scaler
from db.queue import pending_reasons
from db.queue.pending_reasons import Queue
from db.runs import comparisons, runs, trash, views
from db.runs.grouping import GROUPED_BY, Grouped, group_runs
from db.runs.run_filters import Filter, InStatus, Term
from db.tables import ENDED, Run
from db.telemetry import latest_metrics, series
from halfstep.api_client.credentials import is_local

router = Router()

PAGE_SIZE = 50
DENSITIES = ("compact", "regular", "roomy")
#: Limits of the charts view: runs per chart, and metrics with a panel.
MOST_DRAWN, MOST_PANELS = 10, 8


@dataclass(frozen=True)
class Listed:
    """A page of the list."""

    rows: Sequence[tuple[Run, str]] = ()
    total: int = 0
    first: int = 1  # number of its first row, from 1
    active: int | None = None  # listed runs that have not ended; None if not sorted into bands
    metrics: Sequence[str] = ()  # first metric of each run that has one

    @property
    def last(self) -> int:
        """The number of its last row."""
        return self.first + len(self.rows) - 1

    @property
    def previous(self) -> int | None:
        """Id that the previous page ends before; None on the first page."""
        return self.rows[0][0].id if self.rows and self.first > 1 else None

    @property
    def next(self) -> int | None:
        """Id that the next page starts after; None on the last page."""
        return self.rows[-1][0].id if self.rows and self.last < self.total else None


@dataclass(frozen=True)
class ParsedFilter:
    """A filter as text and as terms, with its mistakes."""

    text: str
    terms: Filter = ()
    mistakes: Sequence[filters.Mistake] = field(default_factory=list)


@router.get("/runs", SIGNED_IN)
def list_runs(
    context: Context,
    filter_text: Annotated[str, Query(alias="filter")] = "",
    more: str = "",
    sort: Sort = NEWEST_FIRST,
    chosen: Annotated[Text, Query(alias="columns")] = "",
    group: Name = "",
    current: Text = "",
    view: Literal["table", "charts"] = "table",
    before: RunId | None = None,
    after: RunId | None = None,
    ended: RowId = 0,
    deleted: RowId | None = None,
) -> HTMLResponse:
    """Show the runs, newest first; filter, order and columns are in the address.

    An invalid filter is marked, and nothing is listed.
    more: terms to add to the filter.
    current: columns of an open page that fetches new rows; they stay.
    group: column or setting to group by; groups show only the columns that hold numbers.
    view: charts shows the series of listed runs next to the list.
    ended: number of runs selected for cancellation that had ended already.
    deleted: id of the run that was just deleted.
    """
    request, session, principal = context.request, context.session, context.principal
    shown, sort = columns.chosen(chosen), sort or NEWEST_FIRST
    parsed = _parse(f"{filter_text} {more}".strip(), principal.user.name)
    group_notes = grouping.notes(session, group) if group else []
    is_grouped = bool(group) and not group_notes
    saved, queue = views.list_views(session, principal.user), Queue.read(session)
    counted = view_tabs.count_expressions(principal.user, saved)
    numbers = [
        *list_facts.numbers(),
        runs.count_matching(_exclude_ended(parsed.terms)),
        *counted.values(),
    ]
    newest, moment, in_trash, counts = trash.newest_and_contents(session, numbers)
    facts, active = list_facts.from_counts(counts[:3], queue), counts[3]
    group_rows, listed = Grouped([], 0, ""), Listed()
    if is_grouped and not parsed.mistakes:
        listed = Listed(total=runs.count(session, parsed.terms))
    elif not parsed.mistakes:
        listed = _read_page(session, parsed.terms, sort, before, after, active)
    is_usual = not chosen.strip()
    if is_usual and current:
        shown = columns.chosen(current)
    elif is_usual:
        some = _read_page(session, parsed.terms, NEWEST_FIRST) if is_grouped else listed
        shown = columns.usual([run for run, _owner in some.rows], some.metrics)
    figures = grouping.figures(shown, group)
    names = [column.sort for column in figures]
    followed = listed.rows
    if is_grouped and not parsed.mistakes:
        group_rows = group_runs(session, group, names=names, conditions=parsed.terms, sort=sort)
        # The runs of all groups that a live page can follow.
        followed = runs.newest(session, conditions=_exclude_ended(parsed.terms), limit=PAGE_SIZE)
    marks = pending_reasons.marks([run for run, _owner in followed], queue, moment)
    lines = series.sparklines(session, [run for run, _owner in listed.rows])
    values = columns.values(session, [run.id for run, _owner in listed.rows], shown)
    present = {"filter": parsed.text, "sort": sort, "columns": "" if is_usual else chosen}
    present |= {"group": group, "view": view}
    position = {"before": before, "after": after}

    def at(**changes: object) -> str:
        """Return the URL of the list with these changes."""
        return columns.list_address(**(present | position | changes))

    chips, invalid = filters.chips(parsed.text, parsed.mistakes)
    return context.render(
        "runs/runs.html",
        status_code=422 if parsed.mistakes else 200,
        rows=[
            (summary, lines[summary.id], values[summary.id])
            for summary in summarise_all(session, listed.rows, context.settings, queue)
        ],
        listed=listed,
        newest=newest,
        cursor=list_cursor(newest, marks, is_worker_up=queue.has_takers, facts=facts),
        facts=facts,
        workers=[worker.name for worker in queue.workers if worker.drained_at is None],
        server_url=public_address(request),
        is_local_server=is_local(public_address(request)),
        filter=parsed.text,
        chips=chips,
        valid_filter=" ".join(chip.word for chip in chips),
        invalid_filter=invalid,
        mistakes=parsed.mistakes,
        notes=[]
        if parsed.mistakes
        else [*group_notes, *_notes(session, parsed, sort, group, shown)],
        total=listed.total,
        sort=sort,
        columns=shown,
        others=[column for column in BUILT_IN.values() if column not in shown],
        is_usual=is_usual,
        chosen="" if is_usual else columns.address(shown),
        column_names=",".join(column.name for column in shown),
        destinations=principal.destinations(queue.usage.shares),
        group=group if is_grouped else "",
        unknown_group="" if is_grouped else group,
        groups=group_rows,
        narrowed_filters=[
            grouping.narrow(parsed.text, group, group_rows.path, row.value)
            for row in group_rows.groups
        ],
        paired=grouping.pair(session, group_rows),
        figures=figures,
        best={name: metric_direction.lowest(name, []) for name in names},
        grouped_by=GROUPED_BY,
        view=CHARTS if view == CHARTS and not is_grouped else TABLE,
        density=_density(request),
        chart_rows=_chart_rows(session, listed) if view == CHARTS else (),
        most_drawn=MOST_DRAWN,
        preferences=preferences(session, principal.user, SEVERAL_RUNS) if view == CHARTS else None,
        at=at,
        address_of=columns.list_address,
        views=saved,
        tabs=view_tabs.tabs(saved, dict(zip(counted, counts[4:], strict=True))),
        before=before or after,
        ended=ended,
        deleted=trash.restorable(session, deleted),
        days=context.settings.trash_days,
        trash_contents=in_trash,
        disk=disk(context.settings),
    )


def _chart_rows(session: Session, listed: Listed) -> list[tuple[str, str, str]]:
    """Return name, title and note of each panel of the charts view."""
    some = [run for run, _owner in listed.rows]
    scaled = sum(has_scaler(run) for run in some)
    note = "" if scaled == len(some) else "runs with a loss scaler"
    ids = [run.id for run in some]
    known = comparisons.metric_names(session, ids, most=MOST_PANELS)
    metrics = sorted((name for name in known if not name.startswith("run/")), key=_is_of_training)
    return [
        ("loss", "Loss", ""),
        *((name, name, "") for name in metrics[:1]),
        *([("scale", "Loss scale", note)] if scaled else []),
        ("grad_norm", "Gradient norm", ""),
        *((name, name, "") for name in metrics[1:]),
        ("lr", "Learning rate", ""),
    ]


def _is_of_training(metric: str) -> bool:
    return not metric.lower().startswith(latest_metrics.EVALUATIONS)


def _density(request: Request) -> str:
    """Return the row height chosen in this browser."""
    chosen = request.cookies.get("halfstep-density", "")
    return chosen if chosen in DENSITIES else "regular"


def _parse(text: str, me: str) -> ParsedFilter:
    try:
        return ParsedFilter(text, filters.read(text, me=me))
    except filters.BadFilter as error:
        return ParsedFilter(text, mistakes=error.mistakes)


def _exclude_ended(terms: Filter) -> Filter:
    return (*terms, Term(InStatus(ENDED), is_negated=True))


def _read_page(
    session: Session,
    terms: Filter,
    sort: str,
    before: int | None = None,
    after: int | None = None,
    active: int = 0,
) -> Listed:
    """Read a page; a page before the first full one is the first.

    active: number of matching runs that have not ended.
    """
    has_bands = sort == NEWEST_FIRST
    query: dict[str, Any] = {"conditions": terms, "sort": ACTIVE_FIRST if has_bands else sort}
    rows = runs.page_of_list(session, **query, before=before, after=after, limit=PAGE_SIZE)
    if before is None and after is not None and len(rows.rows) < PAGE_SIZE:
        after = None
        rows = runs.page_of_list(session, **query, limit=PAGE_SIZE)
    has_previous = rows.rows and (before or after) is not None
    ahead = runs.count_ahead(session, rows.rows[0][0].id, **query) if has_previous else 0
    bands = active if has_bands else None
    return Listed(rows.rows, rows.total, ahead + 1, bands, rows.metrics)


def _notes(
    session: Session, parsed: ParsedFilter, sort: str, group: str, shown: Iterable[Column]
) -> list[str]:
    own = [column.name for column in shown if column.is_own]
    return filters.notes(session, parsed.terms, NEWEST_FIRST if group else sort, own)
