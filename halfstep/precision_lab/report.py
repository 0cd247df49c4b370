"""Result of a precision diff, for scripts and notebooks."""

from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import msgspec

from halfstep.number_formats import number, percent
from halfstep.precision_lab.suggestions import ROUNDING_UNIT, Suggestions, suggestions_of
from halfstep.telemetry.events import PlanModule, PrecisionDiff, PrecisionRow

if TYPE_CHECKING:
    import pandas

HTML_ROWS, HTML_CAUSES = 200, 10
COLUMNS = ("Module", "", "Error", "Local", "Inherited", "Cosine", "Flushed", "Saturated", "Bits")


class PrecisionReport:
    """Errors of a low precision against a reference, by module call and parameter."""

    def __init__(self, event: PrecisionDiff) -> None:
        self.event = event

    @property
    def rows(self) -> list[PrecisionRow]:
        """The rows: results and input gradients in the order of the calls, then parameters."""
        return self.event.rows

    @property
    def error(self) -> float:
        """Relative L2 error of the gradient of all parameters together."""
        return float(self.event.error)

    @property
    def cosine(self) -> float:
        """Cosine similarity of the whole gradient and the reference's."""
        return float(self.event.cosine)

    @property
    def causes(self) -> list[PlanModule]:
        """Modules by the error of the whole gradient that each causes alone, with their costs.

        Measured on request: `precision_diff(…, causes=10)`.
        """
        return self.event.causes

    @cached_property
    def _suggestions(self) -> Suggestions:
        return suggestions_of(self.event)

    def suggest(self) -> Suggestions:
        """Return the modules that should stay in fp32, with the evidence, and what stays wrong."""
        return self._suggestions

    def row(self, name: str, direction: str = "forward", call: int = 1) -> PrecisionRow:
        """Return one row; KeyError if there is none. call: 0 for a parameter."""
        for row in self.rows:
            if (row.name, row.direction) == (name, direction) and row.call in (0, call):
                return row
        raise KeyError(f"{name}, {direction}, call {call}: no such row")

    def frame(self) -> "pandas.DataFrame":
        """Return the rows as a pandas DataFrame; requires pandas."""
        import pandas

        return pandas.DataFrame([msgspec.structs.asdict(row) for row in self.rows])

    def __repr__(self) -> str:
        event = self.event
        units = self.error / ROUNDING_UNIT[event.dtype]
        return (
            f"<PrecisionReport {event.dtype} against {event.reference}: gradient error "
            f"{number(self.error)} ({number(units)} rounding units), "
            f"cosine {number(self.cosine, 6)}, {len(self.rows)} rows, "
            f"{len(self.suggest())} suggestions>"
        )

    def _repr_html_(self) -> str:
        """Return the suggestions and the first rows as a table, for notebooks."""
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(map(_html_row, self.rows[:HTML_ROWS]))
        more = len(self.rows) - HTML_ROWS
        rest = f"<p>{more} more rows in <code>rows</code>.</p>" if more > 0 else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.event.notes)
        causes = "".join(
            f"<li>{escape(cause.role)}: {number(max(map(float, cause.errors.values())))}, "
            f"{percent(cause.operations)} of the operations and {percent(cause.memory)} of the "
            "memory of all results</li>"
            for cause in self.causes[:HTML_CAUSES]
        )
        if causes:
            causes = f"<p>Gradient error that each module causes alone:</p><ol>{causes}</ol>"
        return (
            f"<p>{escape(repr(self)[1:-1])}</p><pre>{escape(str(self.suggest()))}</pre>{notes}"
            f"{causes}"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
        )


def _html_row(row: PrecisionRow) -> str:
    call = f" #{row.call}" if row.call > 1 else ""
    numbers = (row.error, row.local, row.inherited, row.cosine, row.flushed, row.saturated)
    cells = [escape(row.name + call), row.direction, *map(number, numbers), number(row.bits, 3)]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
