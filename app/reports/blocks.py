"""Panels in the Markdown of a report: fenced blocks, parsed and checked.

    ```panel
    runs: 1, 3
    metrics: loss, val/accuracy
    x: time
    smoothing: 0.6
    y: log
    ```

A block `runs` is a table of runs; its `columns` are figures and settings, by default those in which
the runs differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.compare.comparison import AXES, MOST_DRAWN, MOST_RUNS
from app.html.markdown import Block, blocks_of
from app.http.parameters import NAME_CHARACTERS, as_run_ids
from db.errors import Invalid

#: Panels and tables of one report, and tables among them, each of which reads all of its runs.
MOST_PANELS, MOST_TABLES = 40, 10
TITLE_CHARACTERS = 200
#: Keys of a block by its kind.
KEYS = {
    "panel": ("runs", "metrics", "title", "x", "smoothing", "y"),
    "runs": ("runs", "columns", "title"),
}
SCALES = ("linear", "log")
HIGHEST_SMOOTHING = 0.99


@dataclass(frozen=True)
class Panel:
    """A panel, or a table of runs, as its block describes it."""

    kind: str  # panel or runs
    run_ids: list[int] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)  # of a table: its columns
    title: str = ""
    x: str = "step"
    smoothing: float = 0.0
    is_log: bool = False
    errors: dict[str, str] = field(default_factory=dict)  # by key; such a panel is not drawn

    @property
    def shown(self) -> dict[str, object]:
        """The panel's contents, as stored in `Report.panels`."""
        axes = [self.x.removeprefix("metric:")] if self.x.startswith("metric:") else []
        return {"kind": self.kind, "runs": self.run_ids, "metrics": self.metrics, "axes": axes}

    @property
    def block(self) -> str:
        """The block that describes it."""
        values = {
            "title": self.title,
            "runs": ", ".join(map(str, self.run_ids)),
            "metrics" if self.kind == "panel" else "columns": ", ".join(self.metrics),
            "x": "" if self.x == "step" else self.x,
            "smoothing": f"{self.smoothing:g}" if self.smoothing else "",
            "y": "log" if self.is_log else "",
        }
        lines = [f"{key}: {value}" for key, value in values.items() if value]
        return "\n".join((f"```{self.kind}", *lines, "```"))


def panels_of(text: str) -> list[Panel]:
    """Return the panels of a report in order, and the charts that it embeds by their URLs."""
    return [
        parse(block)
        if isinstance(block, Block)
        else Panel("chart", list(block.run_ids), [block.series])
        for block in blocks_of(text)
    ]


def check(panels: Sequence[Panel]) -> None:
    """Check the panels of a report that is to be saved. Raises Invalid."""
    errors = {
        f"panel {number}: {key}": text
        for number, panel in enumerate(panels, 1)
        for key, text in panel.errors.items()
    }
    if errors:
        raise Invalid({"text": "; ".join(f"{key}: {text}" for key, text in errors.items())})
    if len(panels) > MOST_PANELS:
        raise Invalid({"text": f"{len(panels)} panels; allowed: at most {MOST_PANELS}"})
    if (tables := sum(panel.kind == "runs" for panel in panels)) > MOST_TABLES:
        raise Invalid({"text": f"{tables} tables of runs; allowed: at most {MOST_TABLES}"})


def parse(block: Block) -> Panel:
    """Parse a fenced block; what is wrong is in the panel's errors."""
    values: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    allowed = KEYS[block.kind]
    for line in filter(str.strip, block.content.splitlines()):
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or key not in allowed:
            errors[line.strip()[:100]] = f"allowed: lines of {', '.join(allowed)}, as 'runs: 1, 3'"
        else:
            values.setdefault(key, []).append(value)
    return read(block.kind, {key: ", ".join(lines) for key, lines in values.items()}, errors)


def read(kind: str, values: Mapping[str, str], errors: dict[str, str] | None = None) -> Panel:
    """Return the panel of these values by key; what is wrong is in its errors."""
    errors = dict(errors or {})

    def parse_field(key: str, parser: Callable[[str], object], usual: object) -> Any:
        try:
            return parser(values[key]) if values.get(key) else usual
        except Invalid as error:
            errors.update(error.errors)
            return usual

    names = "metrics" if kind == "panel" else "columns"
    panel = Panel(
        kind,
        run_ids=parse_field("runs", lambda text: as_run_ids("runs", text, most=MOST_RUNS), []),
        metrics=parse_field(names, lambda text: _names(names, text), []),
        title=parse_field("title", _title, ""),
        x=parse_field("x", _axis, "step"),
        smoothing=parse_field("smoothing", _smoothing, 0.0),
        is_log=parse_field("y", _is_log, False),
        errors=errors,
    )
    if not panel.run_ids and "runs" not in errors:
        errors["runs"] = f"no run is given; allowed: comma-separated run ids, at most {MOST_RUNS}"
    if kind == "panel" and not panel.metrics and names not in errors:
        errors[names] = f"none is given; allowed: comma-separated names, at most {MOST_DRAWN}"
    return panel


def _names(key: str, text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if len(names) > MOST_DRAWN:
        raise Invalid({key: f"{len(names)} names; allowed: at most {MOST_DRAWN}"})
    if long := next((name for name in names if len(name) > NAME_CHARACTERS), None):
        most = f"allowed: at most {NAME_CHARACTERS} characters"
        raise Invalid({key: f"{long[:100]!r} is too long; {most}"})
    return names


def _title(text: str) -> str:
    if len(text) > TITLE_CHARACTERS:
        most = f"allowed: at most {TITLE_CHARACTERS}"
        raise Invalid({"title": f"{len(text):,} characters; {most}"})
    return text


def _axis(text: str) -> str:
    if text not in AXES and not (text.startswith("metric:") and len(text) <= NAME_CHARACTERS):
        allowed = f"{', '.join(AXES)}, metric:NAME"
        raise Invalid({"x": f"{text[:100]!r} is not valid; allowed: {allowed}"})
    return text


def _smoothing(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= HIGHEST_SMOOTHING:
        allowed = f"a number from 0 to {HIGHEST_SMOOTHING}"
        raise Invalid({"smoothing": f"{text[:100]!r} is not valid; allowed: {allowed}"})
    return value


def _is_log(text: str) -> bool:
    if text not in SCALES:
        raise Invalid({"y": f"{text[:100]!r} is not valid; allowed: {', '.join(SCALES)}"})
    return text == "log"
