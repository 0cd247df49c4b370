"""Live card of a watched run in a notebook: loss, loss scale, skips and health."""

import math
from collections import deque
from html import escape
from typing import Any

import numpy as np

from halfstep.clock import clock
from halfstep.number_formats import count as count_text
from halfstep.number_formats import number
from halfstep.number_formats import scale as scale_text
from halfstep.run_labels import HEALTHS
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.scaling_health import WINDOW, count, judge
from halfstep.telemetry.spool import Steps

REFRESH_SECONDS = 1.0  # between two updates of a displayed card
MOST_POINTS = 300  # of the chart of the loss
WIDTH, HEIGHT = 280, 44  # of that chart in pixels
COLORS = {
    "healthy": "#14703f",
    "calibrating": "#3f51d4",
    "oscillating": "#8a5200",
    "collapsing": "#bb2a25",
    "dead": "#bb2a25",
}
UNSCALED = (None, 1.0)


class Card:
    """A notebook's card of a run."""

    def __init__(self) -> None:
        self._step = 0  # attempted steps
        self._loss: float | None = None
        self._scale: float | None = None
        self._skipped = 0
        self._skips: deque[int] = deque()  # in the last WINDOW steps
        self._losses: deque[tuple[int, float]] = deque(maxlen=4 * MOST_POINTS)
        self._display: Any = None  # IPython's handle of the shown card
        self._refreshed_at = 0.0

    def add(self, steps: Steps) -> None:
        """Take the recorded rows of steps."""
        self._step = int(steps["step"][-1])
        skips = steps["step"][(steps["flags"] & SKIPPED) != 0]
        self._skipped += len(skips)
        self._skips.extend(int(step) for step in skips)
        while self._skips and self._skips[0] <= self._step - WINDOW:
            self._skips.popleft()
        scale = float(steps["scale"][-1])
        self._scale = None if math.isnan(scale) else scale
        finite = np.isfinite(steps["loss"])
        self._losses.extend(
            (int(step), float(loss))
            for step, loss in zip(steps["step"][finite], steps["loss"][finite], strict=True)
        )
        self._loss = float(steps["loss"][-1])

    def show(self, html: str) -> bool:
        """Display the card with a handle, so that it can be updated; False outside of IPython."""
        from IPython.display import HTML, display

        self._display = display(HTML(html), display_id=True)  # type: ignore[no-untyped-call]
        return self._display is not None

    @property
    def is_due(self) -> bool:
        """Whether a displayed card is to be updated."""
        return self._display is not None and clock() - self._refreshed_at > REFRESH_SECONDS

    def refresh(self, html: str) -> None:
        """Update the displayed card, if there is one."""
        if self._display is not None:
            from IPython.display import HTML

            self._refreshed_at = clock()
            self._display.update(HTML(html))  # type: ignore[no-untyped-call]

    def html(self, name: str, place: str, page: str | None, *, is_over: bool) -> str:
        """Return the card.

        place: the run's folder, or its page's URL.  page: URL to link to.
        """
        link = escape(place)
        if page:
            link = f'<a href="{escape(page)}" target="_blank" rel="noopener">{link}</a>'
        figures = [
            ("Step", count_text(self._step)),
            ("Loss", number(self._loss)),
        ]
        if self._scale not in UNSCALED or self._skipped:
            figures += [
                ("Loss scale", scale_text(self._scale)),
                ("Skipped", count_text(self._skipped)),
            ]
        cells = "".join(
            f'<div style="min-width:5em"><div style="font-size:11px;opacity:.7">{label}</div>'
            f'<div style="font-size:17px;font-weight:600">{escape(value)}</div></div>'
            for label, value in figures
        )
        state = "ended" if is_over else "watching"
        return (
            '<div style="border:1px solid #7c859766;border-radius:8px;padding:10px 14px;'
            'max-width:42em;font-family:system-ui,sans-serif;font-size:13px">'
            f"<div><b>{escape(name)}</b> · {state} · {link}</div>"
            f'<div style="display:flex;gap:18px;margin:8px 0">{cells}{self._chart()}</div>'
            f"{self._health()}</div>"
        )

    def _health(self) -> str:
        if not self._step or (self._scale in UNSCALED and not self._skipped):
            return '<div style="opacity:.7">No GradScaler detected.</div>'
        health = judge(count(self._step, list(self._skips), self._scale))
        word = f'<b style="color:{COLORS[health.word]}">{HEALTHS[health.word]}</b>'
        return f"<div>{word} {escape(health.reason)}</div>"

    def _chart(self) -> str:
        """Return the loss as a line without axes."""
        points = list(self._losses)[:: max(len(self._losses) // MOST_POINTS, 1)]
        if len(points) < 2:
            return ""
        steps = np.array([step for step, _ in points], float)
        losses = np.array([loss for _, loss in points])
        x = (steps - steps[0]) / max(steps[-1] - steps[0], 1) * WIDTH
        low, high = float(losses.min()), float(losses.max())
        y = (high - losses) / ((high - low) or 1) * (HEIGHT - 4) + 2
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        return (
            f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="Loss, from '
            f'{number(float(losses[0]))} to {number(float(losses[-1]))}">'
            f'<polyline points="{line}" fill="none" stroke="#3f51d4" stroke-width="1.5"/></svg>'
        )
