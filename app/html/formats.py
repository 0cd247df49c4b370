"""Filters of templates: numbers, times and sizes for display."""

import json
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain, zip_longest
from typing import Any

from markupsafe import Markup

from app.runs.filters import quote
from app.server_address import explain_local
from db.health.health_statement import health_statement
from db.terminal_codes import without_codes
from halfstep import number_formats
from halfstep.number_formats import count, duration, metric, number, percent, quantity, size
from halfstep.run_labels import FAILURE_KINDS, HEALTHS, STATES

memory = size  # of a device or an upload

#: Characters up to which a run's name has room; the last words of another one, or its last letters.
_SHORT_NAME = 16
_MOST_VALUES = 2  # of settings in a name that all stay
_TAILS = re.compile(r"(?<=[-_/.\s]).{3,14}$"), re.compile(r".{6}$")

_POWER = re.compile(r"\b2\^(-?\d+)")

#: Last parts of a setting's path that say nothing without the part before.
UNSPECIFIC = frozenset({"enabled", "every", "kind", "name", "path"})


def scale(value: float | None) -> Markup:
    """Format a loss scale as HTML."""
    power = number_formats.scale_exponent(value)
    if power is None:
        return Markup(number(value))  # noqa: S704 - digits only
    return power_of_two(power)


def name_parts(name: str) -> list[tuple[str, bool]]:
    """Split a run's name into parts, and whether a part gives way where the name is too long.

    Names of one or two settings give way, and their values stay. Of more settings only the last
    value stays, and of another name its last words.
    """
    if len(name) <= _SHORT_NAME:
        return [(name, False)] if name else []
    if 1 <= name.count("=") <= _MOST_VALUES:
        parts = [part for part in re.split(r"(=\S*\s*)", name) if part]
        return [(part, not part.startswith("=")) for part in parts]
    at = max(name.rfind("="), 0) or next(
        (found.start() for tail in _TAILS if (found := tail.search(name))), 0
    )
    return [
        (part, gives_way) for part, gives_way in ((name[:at], True), (name[at:], False)) if part
    ]


def progress(value: float) -> str:
    """Format a progress in per cent, rounded down: 100 % is the end."""
    return percent(math.floor(value) / 100)


def time(seconds: float | None) -> Markup:
    """Format a time in UTC; the browser shows it in its own time zone."""
    if seconds is None:
        return Markup("–")
    moment = datetime.fromtimestamp(seconds, UTC)
    iso = moment.isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        iso, f"{moment:%Y-%m-%d %H:%M:%S} UTC", f"{moment:%d %b %H:%M}"
    )


def as_json(value: Any) -> str:
    """Format a value as JSON, to be copied."""
    return json.dumps(value, indent=2)


def setting_name(path: str) -> str:
    """Shorten the path of a setting to its last part, or two where one says nothing."""
    group, _, name = path.rpartition(".")
    return f"{group.rpartition('.')[2]}.{name}" if group and name in UNSPECIFIC else name


def sparkline(values: list[object], width: int = 96, height: int = 24) -> Markup:
    """Draw a small line of the loss; non-finite values are gaps."""
    numbers = [v if isinstance(v, int | float) else None for v in values]
    finite = [v for v in numbers if v is not None]
    if len(finite) < 2:
        return Markup("")
    low, high = min(finite), max(finite)
    spread = (high - low) or 1.0
    parts, pen = [], "M"
    for index, v in enumerate(numbers):
        if v is None:
            pen = "M"
            continue
        x = 1 + index * (width - 2) / (len(numbers) - 1)
        y = 2 + (high - v) / spread * (height - 4)
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return Markup(
        '<svg class="sparkline" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'preserveAspectRatio="none" '
        'aria-label="Loss from {} to {}"><path d="{}"/></svg>'
    ).format(width, height, width, height, number(finite[0]), number(finite[-1]), "".join(parts))


def recipe_name(name: str) -> str:
    """Return a recipe's name; runs of earlier versions have a path, whose last part is shown."""
    return name.rpartition("/")[2]


def sentence(text: str) -> str:
    """Capitalize a text, unless it begins with the name of a setting, such as weights.path."""
    first = text.partition(" ")[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() else text


def add_links(text: str, named: Iterable[Any]) -> Markup:
    """Add links to the runs that a text names. named: their ids and labels, in order."""
    html = Markup()
    for run in named:
        before, label, text = text.partition(run.label)
        html += before
        if label:
            html += Markup('<a href="/runs/{}">{}</a>').format(run.id, label)
    return html + text


def with_code(text: str) -> Markup:
    """Format a text with code between backticks and loss scales such as 2^16 as HTML."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one has no end
        return _with_powers(text)
    codes = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    prose = map(_with_powers, parts[::2])
    return Markup().join(chain.from_iterable(zip_longest(prose, codes, fillvalue="")))


def _with_powers(text: str) -> Markup:
    prose, *powers = _POWER.split(text)
    pairs = zip(powers[::2], powers[1::2], strict=True)
    return Markup("{}").format(prose) + Markup().join(
        power_of_two(exponent) + after for exponent, after in pairs
    )


def power_of_two(exponent: object) -> Markup:
    """Format a power of two as HTML."""
    return Markup("2<sup>{}</sup>").format(str(exponent).replace("-", "−"))


def failure_label(kind: str) -> str:
    """Return the label of a failure's cause."""
    return FAILURE_KINDS.get(kind, kind)


FILTERS = {
    "explain_local": explain_local,
    "failure_label": failure_label,
    "health_label": HEALTHS.__getitem__,
    "state_label": STATES.__getitem__,
    "health_statement": health_statement,
    "add_links": add_links,
    "with_code": with_code,
    "recipe_name": recipe_name,
    "sentence": sentence,
    "quantity": quantity,
    "quote": quote,
    "number": number,
    "metric": metric,
    "name_parts": name_parts,
    "setting_name": setting_name,
    "without_codes": without_codes,
    "count": count,
    "scale": scale,
    "duration": duration,
    "percent": percent,
    "progress": progress,
    "size": size,
    "time": time,
    "as_json": as_json,
    "value": number_formats.setting,
    "sparkline": sparkline,
}
