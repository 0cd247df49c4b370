"""Reports as HTML: Markdown, panels and tables of the runs that the reader sees."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from sqlalchemy.orm import Session

from app.compare import comparison, run_colors, run_labels
from app.compare.comparison import SERIES, Comparison
from app.html import chart_links, markdown
from app.html.markdown import Block, SharedReport
from app.html.rendering import fragment
from app.live.run_updates import list_cursor
from app.reports import blocks
from app.reports.blocks import Panel
from db.health import scaling_health
from db.queue import pending_reasons
from db.queue.pending_reasons import Queue
from db.runs import reports, runs
from db.settings import Settings
from db.tables import ENDED, Run
from db.telemetry import damage, latest_metrics
from halfstep.suggestions import did_you_mean

#: Metrics among which a misspelt name is searched.
MOST_SUGGESTED = 1000
#: Returns the comparison of some runs, as the reader may see it.
Compare = Callable[[list[int]], Comparison]


@dataclass(frozen=True)
class Drawn:
    """A report as HTML. cursor: of the stream of changes of its runs; empty if all have ended."""

    html: Markup
    cursor: str


def draw(
    session: Session,
    settings: Settings,
    text: str,
    *,
    shared: SharedReport | None = None,
    compare: Compare | None = None,
) -> Drawn:
    """Return a report as HTML. shared: the link by which it is read, if any.

    compare: for a reader who may not see all of a run.
    """
    panels = blocks.panels_of(text)
    ids = list(dict.fromkeys(run_id for panel in panels for run_id in panel.run_ids))
    known, deleted = reports.drawn(session, ids)
    damage.note_all([run.damage for run in known.values()])
    numbers = count(1)
    tables_left = blocks.MOST_TABLES  # a preview may have more, which saving refuses

    def compare_runs(run_ids: list[int]) -> Comparison:
        return comparison.of_runs(session, run_ids, settings)

    def draw_block(block: Block) -> str:
        nonlocal tables_left
        panel, number = blocks.parse(block), next(numbers)
        tables_left -= panel.kind == "runs"
        if number > blocks.MOST_PANELS or tables_left < 0:
            return ""
        shown = [known[run_id] for run_id in panel.run_ids if run_id in known]
        values: dict[str, Any] = {
            "panel": panel,
            "number": number,
            "runs": shown,
            "missing": _missing(panel, known, deleted, by_link=shared is not None),
            "by_link": shared is not None,
        }
        if panel.errors or not shown:
            return fragment("reports/_panel_error.html", **values)
        values["labels"] = run_labels.label(
            [run.id for run in shown], [run.name for run in shown], ()
        )
        if panel.kind == "runs":
            table = (compare or compare_runs)([run.id for run in shown])
            names = {row.name for row in table.rows(every_setting=True)}
            columns = [_column(name, names) for name in panel.metrics]
            values |= {"comparison": table, "columns": columns}
            values["missing"] += [
                _none_has(name, () if shared else names) for name in columns if name not in names
            ]
            return fragment("reports/_runs.html", **values)
        if not shared:
            values["missing"] += _misspelt(session, panel.metrics, shown)
        base = shared.path if shared else ""
        return fragment(
            "reports/_panel.html", **values, **_lines(shown), rows=_rows(panel, shown, base)
        )

    html = markdown.report(text, draw_block, shared)
    is_over = all(run.status in ENDED for run in known.values())
    return Drawn(html, "" if is_over else _cursor(session, list(known)))


def _column(name: str, names: Collection[str]) -> str:
    """Return the row of a table that a name means: a setting also by the last part of its path."""
    paths = [path for path in names if path.endswith(f".{name}")]
    return paths[0] if name not in names and len(paths) == 1 else name


def _misspelt(session: Session, names: Sequence[str], shown: Sequence[Run]) -> list[str]:
    """Return a sentence for each metric that no run has, and that resembles one."""
    ids = [run.id for run in shown]
    named = [name for name in names if name not in SERIES]
    logged = latest_metrics.page_of_names(session, ids, named=named, limit=0).names
    unknown = [name for name in named if name not in logged]
    if not unknown:
        return []
    known = latest_metrics.page_of_names(session, ids, limit=MOST_SUGGESTED).page
    sentences = [_none_has(name, [*SERIES, *known]) for name in unknown]
    return [sentence for sentence in sentences if sentence.endswith("?")]


def _none_has(name: str, known: Collection[str]) -> str:
    meant = did_you_mean(name, known).strip()
    return f"None of these runs has {name}{f'; {meant}' if meant else '.'}"


def _rows(panel: Panel, shown: Sequence[Run], base: str) -> list[dict[str, str]]:
    """Return the charts of a panel, one per metric. base: path before that of their images."""
    ids = ",".join(str(run.id) for run in shown[: chart_links.MOST_RUNS])
    return [
        {
            "name": name,
            "title": SERIES.get(name, name),
            "image": f"{base}/charts.svg?{urlencode({'runs': ids, 'series': name})}",
        }
        for name in panel.metrics
    ]


def _lines(shown: Sequence[Run]) -> dict[str, object]:
    """Return place of the line, and whether there is a loss scale, by run id."""
    return {
        "places": run_colors.places(run.id for run in shown),
        "scaled": {run.id for run in shown if scaling_health.has_scaler(run)},
    }


def _missing(panel: Panel, known: dict[int, Run], deleted: set[int], *, by_link: bool) -> list[str]:
    """Return a sentence for each run of a panel that is not shown."""
    unseen = "is deleted, or not shared" if by_link else "does not exist or is not visible to you"
    return [
        f"Run {run_id} {'is deleted' if run_id in deleted else unseen}."
        for run_id in panel.run_ids
        if run_id not in known
    ]


def _cursor(session: Session, ids: list[int]) -> str:
    queue = Queue.read(session)
    marks = pending_reasons.live_marks(session, ids, queue)
    return list_cursor(runs.newest_id(session), marks, is_worker_up=queue.has_takers)
