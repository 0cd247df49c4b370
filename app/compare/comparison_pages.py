"""Pages of comparisons: any runs, and groups."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import BeforeValidator
from sqlalchemy.orm import Session

from app.auth.authentication import Principal, SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.compare import comparison
from app.compare.comparison import (
    AXES,
    LABELS,
    MOST_DRAWN,
    MOST_RUNS,
    MOST_SEEDS,
    SERIES,
    Comparison,
)
from app.compare.comparison_api import Margin, Target, ValueOfMetric
from app.compare.interval_plot import interval_plot
from app.compare.parity import (
    Parity,
    ParityQuery,
    group_settings,
    has_steps,
    parity_of,
    shares_seeds,
)
from app.compare.parity_sentences import sentence
from app.compare.shared_links_pages import sharing_panel
from app.dependencies import Db
from app.html.rendering import Context
from app.http.parameters import Name, RunId, Text, as_run_ids
from app.live.run_updates import list_cursor
from app.runs.chart_preferences_api import SEVERAL_RUNS, preferences
from db.access.permissions import Permission
from db.errors import Invalid
from db.queue import pending_reasons
from db.queue.pending_reasons import Queue
from db.runs import comparisons, groups, notes, runs
from db.telemetry import latest_metrics

router = Router()

USUAL = 4
LIKELY_SHOWN = 16


@dataclass(frozen=True)
class View:
    """View options of the page that the server needs; the browser manages the others."""

    x: str
    smooth: float
    draw: list[str]
    by: str
    band: str
    settings: str
    parity: ParityQuery
    carried: list[tuple[str, str]]  # parameters of the URL that the form of the parity keeps
    pinned: list[str] = field(default_factory=list)  # metrics

    @property
    def metrics(self) -> list[str]:
        """Metrics that are compared however many there are: named in the URL, and pinned."""
        names = (*self.draw, self.parity.metric, *self.pinned[:USUAL])
        return [name for name in names if name and name not in SERIES]


def _view(
    request: Request,
    x: Text = "step",
    smooth: Annotated[float, Query(ge=0, le=0.99)] = 0,
    draw: Annotated[list[Text], Query()] = [],  # noqa: B006 - FastAPI copies it
    by: Text = "",
    band: Literal["range", "deviation"] = "range",
    settings: Literal["differing", "all"] = "differing",
    metric: Name = "",
    margin: Annotated[Margin, BeforeValidator(lambda text: text or None)] = None,
    group: Name = "",
    value: ValueOfMetric = "final",
    target: Annotated[Target, BeforeValidator(lambda text: text or None)] = None,
) -> View:
    """Parse the view options of the URL. Raises Invalid."""
    if x not in AXES and not x.startswith("metric:"):
        text = f"{x[:100]!r} is not valid; allowed: {', '.join(AXES)}, metric:NAME"
        raise Invalid({"x": text})
    if len(set(draw)) > MOST_DRAWN:
        text = f"{len(set(draw)):,} charts are given; allowed: at most {MOST_DRAWN}"
        raise Invalid({"draw": text})
    parity = ParityQuery(metric, margin, group, value, target)
    carried = [
        (name, text)
        for name, text in request.query_params.multi_items()
        if name not in vars(parity)
    ]
    drawn = list(dict.fromkeys(draw))
    return View(x, smooth, drawn, by, band, settings, parity, carried)


TheView = Annotated[View, Depends(_view)]


@router.post("/runs/{run_id}/comparison", Permission.SUBMIT_RUN)
def queue_comparison(
    run_id: RunId,
    session: Db,
    principal: SignedIn,
    seeds: Annotated[int, Form(ge=1, le=MOST_SEEDS)] = 1,
    metric: Annotated[Name, Form()] = "",
    margin: Annotated[Margin, Form(), BeforeValidator(lambda text: text or None)] = None,
) -> RedirectResponse:
    """Queue the run in each precision, and redirect to the comparison; of several seeds by metric
    and margin.
    """
    queued = comparison.queue(session, principal.user, runs.get(session, run_id), seeds)
    if seeds == 1:
        return RedirectResponse(f"/groups/{queued[0].group_id}", status_code=303)
    query = {"runs": ",".join(str(run.id) for run in queued), "metric": metric}
    query |= {"margin": str(margin)} if margin else {}
    return RedirectResponse(f"/compare?{urlencode(query, safe=',')}#parity", status_code=303)


@router.get("/compare", SIGNED_IN)
def compare(context: Context, view: TheView, runs: Annotated[str, Query()] = "") -> HTMLResponse:
    """Compare runs; the browser fetches the page again while they change."""
    ids = as_run_ids("runs", runs, most=MOST_RUNS)
    queue = Queue.read(context.session)
    view = _with_pinned(context.session, context.principal, view, ids)
    compared = comparison.of_runs(context.session, ids, context.settings, view.metrics, queue)
    return _page(
        context,
        "compare/compare.html",
        compared,
        view,
        queue,
        is_free=True,
        note="" if compared.missing else notes.read(context.session, notes.of_runs(ids)),
        note_of=f"runs={','.join(map(str, ids))}",
        may_write=not compared.missing and _may_write(context.principal, compared),
    )


def _may_write(principal: Principal, compared: Comparison) -> bool:
    return all(
        principal.grants.may(Permission.SUBMIT_RUN, column.run.project)
        for column in compared.columns
    )


@router.get("/groups/{group_id}", SIGNED_IN)
def show_group(group_id: RunId, context: Context, view: TheView) -> HTMLResponse:
    """Compare the runs of a group, with ratios."""
    queue = Queue.read(context.session)
    ids = [run.id for run, _owner in groups.members(context.session, group_id)]
    view = _with_pinned(context.session, context.principal, view, ids)
    compared = comparison.of_group(context.session, group_id, context.settings, view.metrics, queue)
    return _page(
        context, "compare/group.html", compared, view, queue, is_free=False, group_id=group_id
    )


def _page(
    context: Context, template: str, compared: Comparison, view: View, queue: Queue, **values: Any
) -> HTMLResponse:
    session, principal = context.session, context.principal
    ids = compared.ids
    marks = pending_reasons.live_marks(session, ids, queue)
    newest = runs.newest_id(session)
    return context.render(
        template,
        likely=comparisons.likely(session, ids, most=LIKELY_SHOWN),
        most_runs=MOST_RUNS,
        preferences=preferences(session, principal.user, SEVERAL_RUNS),
        cursor=list_cursor(newest, marks, is_worker_up=queue.has_takers),
        sharing=sharing_panel(session, principal, [column.run for column in compared.columns]),
        **template_values(session, compared, view),
        **values,
    )


def _with_pinned(session: Session, principal: Principal, view: View, ids: Collection[int]) -> View:
    """Return the view with the metrics of these runs that the user has pinned on their pages."""
    recipes = dict.fromkeys(run.recipe for run, _owner in runs.with_owners(session, ids))
    kept = [preferences(session, principal.user, recipe).panels for recipe in recipes]
    names = list(dict.fromkeys(name for panels in kept if panels for name in panels.pinned))
    page = latest_metrics.page_of_names(session, ids, named=names, limit=0) if names else None
    return replace(view, pinned=[name for name in names if page and name in page.names])


def template_values(session: Session, compared: Comparison, view: View) -> dict[str, Any]:
    """Return the template values of a comparison, for signed-in users and read-only links."""
    drawable = SERIES | {name: name for name in compared.names if name not in comparison.LABELS}
    drawn = [name for name in view.draw if name in drawable] or _usual(
        compared, drawable, view.pinned
    )
    parity = _parity(session, compared, view.parity)
    return {
        "comparison": compared,
        "view": replace(view, draw=drawn),
        "every_setting": view.settings == "all",
        "drawable": drawable,
        "series": SERIES,
        "parity": parity,
        "parity_plot": interval_plot(parity) if parity else None,
        "parity_sentence": sentence,
        "has_steps": has_steps,
        "metric_labels": LABELS,
        "notices": list(_notices(compared, view, drawable, parity)),
    }


def _parity(session: Session, compared: Comparison, query: ParityQuery) -> Parity | None:
    """Return the parity of runs that share seeds, of the default metric if none has the other."""
    if not shares_seeds(compared.settings):
        return None
    is_known = query.metric in compared.names or not compared.is_over
    metric = query.metric if is_known else ""
    group = query.group if query.group in group_settings(compared.settings) else ""
    return parity_of(session, compared, replace(query, metric=metric, group=group))


def _notices(
    compared: Comparison, view: View, drawable: dict[str, str], parity: Parity | None
) -> Iterator[str]:
    for name in view.draw:
        if name not in drawable:
            yield f"None of these runs has {name[:100]!r}, so it is not drawn."
    if view.by and view.by not in compared.groupings:
        yield f"These runs do not differ in {view.by[:100]!r}, so they are not grouped."
    metric, group = view.parity.metric, view.parity.group
    if parity and metric not in ("", parity.metric):
        yield f"None of these runs has {metric!r}, so parity is shown for another metric."
    if parity and group and group not in parity.settings:
        yield f"These runs do not differ in {group!r}, so parity is not shown for it."
    if len(compared.names) >= comparison.MOST_METRICS:
        most = comparison.MOST_METRICS
        yield f"The table has the {most} metrics that most of these runs have, and those drawn."


def _usual(compared: Comparison, drawable: dict[str, str], pinned: list[str]) -> list[str]:
    """Return the four panels to draw by default; of runs without steps the foremost metrics."""
    metrics = sorted((name for name in drawable if name not in SERIES), key=compared.relevance)
    has_steps = any(column.run.step for column in compared.columns)
    if metrics and not has_steps:
        return metrics[:USUAL]
    scaled = ["scale"] if any(column.run.is_scaled for column in compared.columns) else []
    foremost = [name for name in pinned if name in metrics] or metrics[:1]
    return [*dict.fromkeys(["loss", *foremost, *scaled, "grad_norm", *metrics])][:USUAL]
