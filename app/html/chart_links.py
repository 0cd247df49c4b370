"""Charts embedded in notes: recognition of chart URLs, and charts as SVG images."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard
from urllib.parse import parse_qs, urlencode, urlsplit

from markupsafe import Markup

from app.html.nonfinite_marks import marks, values_of
from halfstep import number_formats

#: Limit of runs in one image.
MOST_RUNS = 10
POINTS = 300
WIDTH, HEIGHT = 480, 220
#: Series whose axis is logarithmic, as `app/static/compare/comparison.js` has it.
LOGARITHMIC = ("scale", "grad_norm", "grad_norm_clipped")
#: The colours of runs on a light and on a dark ground, as base.css has them.
LIGHT = (
    *("#0000ff", "#b7065e", "#115a00", "#9570ff", "#967704"),
    *("#039ab5", "#6c00a8", "#ff3684", "#035789", "#e85d04"),
)
DARK = (
    *("#007ab2", "#d60581", "#00ba07", "#9c82ff", "#f7d50f"),
    *("#3dffd6", "#9422ff", "#f78c9f", "#68cafc", "#a85900"),
)


def _colors(colors: Sequence[str]) -> str:
    return "".join(f".c{place}{{color:{color}}}" for place, color in enumerate(colors))


_STYLE = Markup(
    "text{{font:14px system-ui,sans-serif;fill:#57606a}}.edge{{stroke:#8b949e66}}{}"
    "@media(prefers-color-scheme:dark){{text{{fill:#b3bcc6}}{}}}"
).format(_colors(LIGHT), _colors(DARK))


_MARK = Markup('text-anchor="middle" style="font-size:11px;fill:currentColor"')


@dataclass(frozen=True)
class Chart:
    """A chart of one series or metric of some runs."""

    run_ids: tuple[int, ...]
    series: str

    @property
    def address(self) -> str:
        """Path of its image."""
        runs = ",".join(map(str, self.run_ids))
        return f"/charts.svg?{urlencode({'runs': runs, 'series': self.series})}"

    @property
    def words(self) -> str:
        """Alternative text of the image."""
        several = "run" if len(self.run_ids) == 1 else "runs"
        return f"Chart: {self.series} of {several} {', '.join(map(str, self.run_ids))}"


def chart_of(address: str) -> Chart | None:
    """Return the chart of a URL: /runs/3?chart=loss, /compare?runs=1,3&draw=loss; else None."""
    try:
        parts = urlsplit(address.strip())
        query = parse_qs(parts.query, max_num_fields=30)
    except ValueError:
        return None
    if parts.scheme or parts.netloc:
        return None
    head, _, number = parts.path.rpartition("/")
    if head == "/runs" and "chart" in query:
        numbers, series = [number], query["chart"][0]
    elif parts.path == "/compare" and "runs" in query:
        numbers, series = query["runs"][0].split(","), query.get("draw", ["loss"])[0]
    else:
        return None
    are_ids = all(text.isascii() and text.isdecimal() and len(text) < 10 for text in numbers)
    if not are_ids or len(series) > 200:
        return None
    return Chart(tuple(map(int, numbers[:MOST_RUNS])), series)


def picture(
    title: str,
    lines: Mapping[str, tuple[Sequence[int], Sequence[float | str | None]]],
    places: Sequence[int],
    nonfinite: Sequence[Sequence[int]] = (),
    *,
    series: str = "loss",
) -> Markup:
    """Draw lines of steps and values by label; values that are not numbers are gaps.

    places: position of each line's run, which decides its colour.  nonfinite: of each line, the
    buckets with values that are not finite; these have marks.  A loss scale has steps.
    """
    is_scale, is_log = series == "scale", series in LOGARITHMIC

    def is_drawn(y: float | str | None) -> TypeGuard[float]:
        return isinstance(y, int | float) and (y > 0 or not is_log)

    values = [y for _, ys in lines.values() for y in ys if is_drawn(y)]
    if not values:
        return _svg(title, Markup('<text x="240" y="110" text-anchor="middle">no values</text>'))
    steps = [step for at in (*(xs for xs, _ in lines.values()), *nonfinite) for step in at]
    first, last = min(steps), max(steps)
    low, high = min(values), max(values)
    at = math.log if is_log else float
    left, right, bottom = 70, WIDTH - 14, HEIGHT - 28
    labels, top = _legend(lines, places, left, right)

    def path(xs: Sequence[int], ys: Sequence[float | str | None]) -> str:
        drawn, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if not is_drawn(y):
                pen = "M"
                continue
            across = left + (x - first) / ((last - first) or 1) * (right - left)
            up = bottom - (at(y) - at(low)) / ((at(high) - at(low)) or 1.0) * (bottom - top)
            is_stepped = is_scale and pen == "L"
            drawn.append(f"H{across:.1f}V{up:.1f}" if is_stepped else f"{pen}{across:.1f} {up:.1f}")
            pen = "L"
        return "".join(drawn)

    drawn = Markup("").join(
        Markup(
            '<path class="c{}" d="{}" fill="none" stroke="currentColor" stroke-width="1.6"/>'
        ).format(place % len(LIGHT), path(*line))
        for place, line in zip(places, lines.values(), strict=True)
    )
    buckets = nonfinite or [()] * len(lines)
    for place, line, own in zip(places, lines.values(), buckets, strict=True):
        nonfinite_values = values_of(*line, own)
        for mark in marks(nonfinite_values, lambda step: (step - first) / ((last - first) or 1)):
            drawn += Markup('<text class="c{}" x="{:.0f}" y="{}" {}>{}</text>').format(
                place % len(LIGHT),
                left + mark.at * (right - left),
                top + 12 if mark.is_above else bottom - 2,
                _MARK,
                mark.sign,
            )
    edges = Markup(
        '<path class="edge" d="M{0} {1}V{2}H{3}" fill="none"/><text x="{4}" y="{5}" '
        'text-anchor="end">{6}</text><text x="{4}" y="{2}" text-anchor="end">{7}</text>'
        '<text x="{0}" y="{8}">step {9}</text><text x="{3}" y="{8}" text-anchor="end">{10}</text>'
    ).format(
        *(
            left,
            top,
            bottom,
            right,
            left - 6,
            top + 9,
            *(_power(value) if is_scale else number_formats.number(value) for value in (high, low)),
        ),
        *(bottom + 18, number_formats.count(first), number_formats.count(last)),
    )
    return _svg(title, edges + drawn + labels)


def _svg(title: str, content: Markup) -> Markup:
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" role="img">'
        "<title>{}</title><style>{}</style>{}</svg>"
    ).format(WIDTH, HEIGHT, title, _STYLE, content)


def _legend(
    labels: Iterable[str], places: Sequence[int], left: int, right: int
) -> tuple[Markup, int]:
    """Return the legend, of as many rows as its labels need, and where the plot begins."""
    drawn, x, y = Markup(), left, 20
    for place, label in zip(places, labels, strict=True):
        text = _cut(label, right - left)
        width = 8 * len(text) + 26
        if x > left and x + width > right:
            x, y = left, y + 18
        drawn += Markup(
            '<circle class="c{}" cx="{}" cy="{}" r="4" fill="currentColor"/>'
            '<text x="{}" y="{}">{}</text>'
        ).format(place % len(LIGHT), x + 4, y - 4, x + 13, y, text)
        x += width
    return drawn, y + 14


def _power(value: float) -> Markup:
    """Format a loss scale, a power of two with a raised exponent."""
    power = number_formats.scale_exponent(value)
    if power is None:
        return Markup(number_formats.number(value))  # noqa: S704 - digits only
    return Markup('2<tspan dy="-5" font-size="10">{}</tspan>').format(power)


def _cut(label: str, pixels: float) -> str:
    most = max(int(pixels / 8) - 3, 3)
    return label if len(label) <= most else f"{label[: most - 1]}…"
