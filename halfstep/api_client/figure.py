"""A run's chart as a plotly figure, for notebooks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfstep.api_client.errors import ApiError
from halfstep.api_client.series import of_page as series_of_page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from halfstep.api_client.response_types import SeriesPage

LOSS, SCALE = "loss", "scale"
#: Constant scale of a run without a loss scaler.
UNSCALED = 1.0
COLORS = ("#3f51d4", "#a45100", "#0b7a75", "#6b4fa0", "#a3195b")
SKIPPED = "#d12d2d"
PANEL = 240  # pixels
MOST_MARKS = 500


def of_page(page: "SeriesPage", names: Sequence[str]) -> "Figure":
    """Return a figure with a panel per name, one below the other. Raises ApiError."""
    try:
        from plotly.graph_objects import Figure, Scatter
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ApiError(0, "plotly is not installed: pip install 'halfstep[plot]'") from error
    lines = series_of_page({**page["metrics"], **page["series"]}, page["x"])
    shown = list(names) or _default(lines)
    if missing := [name for name in shown if name not in lines]:
        allowed = ", ".join(sorted(lines)) or "none yet"
        raise ApiError(404, f"the run has no series {missing[0][:100]!r}; allowed: {allowed}")
    figure: Figure = make_subplots(len(shown), 1, shared_xaxes=True, subplot_titles=shown)
    for row, name in enumerate(shown, 1):
        line = lines[name]
        color = COLORS[(row - 1) % len(COLORS)]
        trace = Scatter(x=line.step, y=line.value, name=name, line={"color": color, "width": 1.5})
        figure.add_trace(trace, row, 1)
        if name == SCALE:
            figure.update_yaxes(type="log", row=row, col=1)
    for step in page["skips"]["steps"][:MOST_MARKS]:
        figure.add_vline(step, line={"color": SKIPPED, "width": 1}, opacity=0.35)
    figure.update_xaxes(title_text="step", row=len(shown), col=1)
    figure.update_layout(
        height=PANEL * len(shown) + 80, showlegend=False, margin={"t": 40, "r": 20}
    )
    return figure


def _default(lines: object) -> list[str]:
    """Return the names of the panels of a run: its loss and, if it has one, its loss scale."""
    by_name: dict[str, object] = dict(lines)  # type: ignore[call-overload]
    scale = by_name.get(SCALE)
    values = getattr(scale, "value", ())
    is_scaled = any(value != UNSCALED for value in values if value == value)
    return [LOSS, SCALE] if is_scaled else [LOSS]
