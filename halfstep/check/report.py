"""Results of a check, as data and as text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from halfstep.number_formats import quantity
from halfstep.telemetry import plain_json
from halfstep.telemetry.plain_json import JsonObject, json_safe

UNKNOWN_LISTED = 5
NO_REPORT = "it is no report of `halfstep check --json`"
#: Limits of an uploaded report: its JSON with the sources, and what of it a page shows.
MOST_BYTES, MOST_ROWS, MOST_FILES, MOST_LINES = 1_000_000, 1000, 100, 20_000


class Row(Struct, frozen=True, kw_only=True):
    """A finding: where, what, how often, and what the numbers are in fp32.

    file, line: of the script, or of the package that it calls.  value: the largest in fp32.
    fits_below: the largest power of two that is a loss scale without the overflow.
    share: of the squared gradient norm that is 0 in half precision.
    steps: the first ones; count: of all.
    """

    kind: str
    is_fault: bool
    title: str
    text: str
    advice: str = ""
    fix: str = ""  # the change to the script, as code
    file: str = ""
    line: int = 0
    source: str = ""
    operator: str = ""
    module: str = ""
    is_backward: bool = False
    symptom: str = ""
    dtype: str = ""
    value: float | None = None
    limit: float | None = None
    fits_below: float | None = None
    share: float | None = None
    loss: float | None = None
    loss_fp32: float | None = None
    elements: tuple[int, int] = (0, 0)  # that are affected, and all
    step: int = 0  # of these values
    steps: list[int] = []
    count: int = 0

    def key(self) -> tuple[str, str, str, str]:
        """Return what makes it the same finding in another version of the script."""
        return self.kind, self.file, self.source, self.operator


class Report(Struct, frozen=True, kw_only=True):
    """The result of a check of some steps of a script."""

    script: str
    torch: str
    steps: int
    rows: list[Row]
    unknown_operators: dict[str, str]
    errors: list[str]
    reproductions: list[str] = []  # scripts that were written
    steps_over_budget: int = 0  # whose shadow values need too much memory
    known: int = 0  # rows that the baseline has, which are left out

    @property
    def has_fault(self) -> bool:
        """Whether a mistake is certain."""
        return any(row.is_fault for row in self.rows)

    def without(self, baseline: "Report") -> "Report":
        """Return a report of the new findings."""
        keys = {row.key() for row in baseline.rows}
        rows = [row for row in self.rows if row.key() not in keys]
        return msgspec.structs.replace(self, rows=rows, known=len(self.rows) - len(rows))


def as_json(report: Report) -> str:
    """Return a report as JSON; numbers that are not finite are texts, as "Infinity"."""
    return json.dumps(as_content(report), indent=2)


def as_content(report: Report) -> JsonObject:
    """Return a report as what JSON has."""
    return dict(json_safe(msgspec.to_builtins(report)))


def from_json(text: str) -> Report:
    """Return the report of a JSON text. Raises ValueError."""
    try:
        return from_content(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{NO_REPORT}: {error}") from error


def from_content(content: object) -> Report:
    """Return the report of parsed JSON. Raises ValueError."""
    try:
        return msgspec.convert(_numbers(content), Report)
    except msgspec.ValidationError as error:
        raise ValueError(f"{NO_REPORT}: {error}") from error


def as_text(report: Report) -> Iterator[str]:
    """Yield the lines of a report for a terminal."""
    faults = sum(row.is_fault for row in report.rows)
    what = f"{faults} mistake{'' if faults == 1 else 's'}" if faults else "no mistake"
    yield f"{report.script}: {what} in {report.steps:,} step{'' if report.steps == 1 else 's'}"
    for row in report.rows:
        place = f"{row.file}:{row.line}" if row.line else report.script
        yield ""
        yield f"{place}  {row.title}{'' if row.is_fault else ' (no mistake)'}"
        yield from (f"    {line}" for line in (row.source, row.text, row.advice) if line)
        yield from (f"        {line}" for line in row.fix.splitlines())
    yield from ("", *left_out(report)) if left_out(report) else ()


def as_github(report: Report) -> Iterator[str]:
    """Yield annotations for a GitHub workflow."""
    for row in report.rows:
        level = "error" if row.is_fault else "notice"
        place = f"file={_escape(row.file)},line={row.line}," if row.line else ""
        text = _escape(f"{row.text} {row.advice}".strip(), is_message=True)
        yield f"::{level} {place}title={_escape(row.title)}::{text}"


def left_out(report: Report) -> list[str]:
    """Return sentences about what is not among the rows."""
    lines = [f"The check failed: {error}" for error in report.errors]
    lines += [f"Reproduction: {path}" for path in report.reproductions]
    if names := list(report.unknown_operators):
        more = f" and {len(names) - UNKNOWN_LISTED} more" if len(names) > UNKNOWN_LISTED else ""
        lines.append(f"Not examined: {', '.join(names[:UNKNOWN_LISTED])}{more}")
    if report.steps_over_budget:
        steps = quantity(report.steps_over_budget, "step")
        lines.append(f"Not examined: {steps} with too many operators or too large tensors")
    if report.known:
        lines.append(f"{report.known} in the baseline, not shown")
    return lines


def _escape(text: str, *, is_message: bool = False) -> str:
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(sign, code)
    return text if is_message else text.replace(":", "%3A").replace(",", "%2C")


def _numbers(value: object) -> Any:
    """Return JSON with the texts of numbers that are not finite as numbers."""
    if isinstance(value, dict):
        return {
            key: float(item) if item in plain_json.NONFINITE else _numbers(item)
            for key, item in value.items()
        }
    return [_numbers(item) for item in value] if isinstance(value, list) else value


def read(path: Path) -> Report:
    """Return the report in a file. Raises OSError and ValueError."""
    return from_json(path.read_text())
