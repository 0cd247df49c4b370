"""Route of chart images, for notes."""

from typing import Annotated

from fastapi import Query, Response
from sqlalchemy.orm import Session

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.compare import run_colors, run_labels
from app.compare.comparison_api import series_of
from app.dependencies import Db
from app.html import chart_links
from app.http.parameters import Text, as_run_ids
from db.health.scaling_health import has_scaler
from db.runs import runs as runs_of

router = Router()

#: The image has its own style, and loads nothing else.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


@router.get("/charts.svg", SIGNED_IN)
def show_chart(
    session: Db, runs: Text, series: Annotated[Text, Query(max_length=200)] = "loss"
) -> Response:
    """Draw one series or metric of the visible runs among these."""
    ids = as_run_ids("runs", runs, most=chart_links.MOST_RUNS)
    return chart(session, ids, series)


def chart(session: Session, ids: list[int], series: str) -> Response:
    """Return the image of one series or metric of runs."""
    windows = series_of(session, ids, [series], 1, None, chart_links.POINTS).runs
    known = [run for run, _owner in runs_of.with_owners(session, ids)]
    names = {run.id: run.name for run in known}
    unscaled = {run.id for run in known if not has_scaler(run)} if series == "scale" else set()
    labels = run_labels.label(list(names), list(names.values()), ()) if names else {}
    lines, drawn, nonfinite = {}, [], []
    for run_id, window in windows.items():
        recorded = window.series.get(series)
        line = recorded if recorded and recorded.y else window.metrics.get(series)
        if line and run_id not in unscaled:
            xs = line.x if line.x is not None else window.x
            lines[labels[run_id]] = (xs, line.y)
            drawn.append(run_id)
            nonfinite.append(line.nonfinite.steps if line.nonfinite else [])
    places = run_colors.places(ids)
    title = f"{series} of {', '.join(lines) or 'no run'}"
    picture = chart_links.picture(
        title, lines, [places[run_id] for run_id in drawn], nonfinite, series=series
    )
    headers = {"Content-Security-Policy": POLICY}
    return Response(str(picture), media_type="image/svg+xml", headers=headers)
