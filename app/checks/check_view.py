"""Contents of the page of a report of `halfstep check`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

import msgspec
from markupsafe import Markup

from app.checks.source_lines import html_of, lines_of, parts_of
from app.html.formats import scale, with_code
from halfstep.check.report import Report, Row, left_out
from halfstep.diagnosis.defect import Kind
from halfstep.diagnosis.observations import EDITS, LATE, NONFINITE
from halfstep.diagnosis.statements import DTYPES
from halfstep.number_formats import count, number, percent, quantity

#: Unmarked lines next to a marked one that are shown, and how many others fold.
CONTEXT, LEAST_FOLDED = 4, 12
STEPS_SHOWN = 5
#: Kinds that are about the calls of the loop, with those of halfstep.diagnosis.
OF_CALLS = EDITS | LATE | {"stale_weight_cache", "no_half_operators"}
OF_NUMBERS = frozenset(get_args(Kind)) - OF_CALLS
#: Kinds in which half precision has lost nothing on the line itself.
NOT_LOST = frozenset({"undefined", "nonfinite_input", "nonfinite_weight", "carried"})
ICONS = {
    **dict.fromkeys(("overflow", "overflow_without_effect", "scale_too_large"), "bolt"),
    **dict.fromkeys(("rounding", "update_lost", "integers_differ", "rejected"), "zero"),
    **dict.fromkeys(("loss_differs", "gradients_differ", "kept_rounded"), "wave"),
    "gradients_underflow": "under",
    **dict.fromkeys(NOT_LOST, "bad"),
}
#: Kinds in whose numbers the loss scale plays no part.
ANY_SCALE = NOT_LOST | {"rounding", "loss_differs", "rejected", "kept_rounded"}


@dataclass(frozen=True)
class Finding:
    """A row of the report, with what is computed from it."""

    row: Row
    tone: str  # bad, warn, or note if it is no mistake
    icon: str
    seen: str  # in how many steps
    half: str  # in half precision
    fp32: str
    fits: Markup | str
    evidence: list[tuple[str, Markup | str]]


@dataclass(frozen=True)
class Line:
    """A line of a source. findings: those that mark it."""

    number: int  # 0: unknown
    html: Markup
    anchor: str
    findings: list[Finding]


@dataclass(frozen=True)
class Source:
    """A file with marked lines. blocks: its lines, and whether they are folded."""

    name: str
    lines: int  # 0: it was not uploaded
    marked: int
    blocks: list[tuple[bool, list[Line]]]


@dataclass(frozen=True)
class Tile:
    """A figure of the summary."""

    label: str
    value: Markup | str
    unit: str = ""
    below: str = ""
    tone: str = ""
    is_lead: bool = False


@dataclass(frozen=True)
class View:
    """Contents of the page."""

    tone: str
    headline: str
    more: str
    pill: str
    tiles: list[Tile]
    sources: list[Source]
    left_out: list[str]
    dtype: str

    @property
    def marked(self) -> list[Line]:
        """The lines with findings, in the order of the page."""
        blocks = [lines for source in self.sources for _is_folded, lines in source.blocks]
        return [line for lines in blocks for line in lines if line.findings]


def view_of(report: Report, sources: Mapping[str, str]) -> View:
    """Return what the page of a report shows. sources: texts by file."""
    findings = [_finding(row, report.steps) for row in report.rows]
    faults = [row for row in report.rows if row.is_fault]
    losses = [row for row in faults if row.kind in OF_NUMBERS - NOT_LOST]
    others = [row for row in faults if row.kind in NOT_LOST]
    calls = [row for row in faults if row.kind not in OF_NUMBERS]
    notes = len(report.rows) - len(faults)
    mistakes = [_lines(losses, "loses precision", "lose precision")] if losses else []
    if others:
        found = _lines(others, "is nonfinite", "are nonfinite")
        is_undefined = all(row.kind == "undefined" for row in others)
        mistakes.append(f"{found} in every precision" if is_undefined else found)
    mistakes += [f"{quantity(len(calls), 'mistake')} in the order of calls"] if calls else []
    more = mistakes[1:] + ([quantity(notes, "note")] if notes else [])
    if report.known:
        more.append(f"{len(report.rows)} new, {report.known} known from the baseline")
    dtypes = {DTYPES.get(row.dtype, row.dtype) for row in report.rows if row.dtype}
    first = mistakes[0] if mistakes else "No line loses precision"
    return View(
        tone="bad" if losses or others else "warn" if calls or report.errors else "good",
        headline=f"{first} in {quantity(report.steps, 'step')}",
        more=", ".join(more),
        pill=first if mistakes else "No mistake",
        tiles=_tiles(report, losses, calls),
        sources=_sources(report, findings, sources),
        left_out=left_out(msgspec.structs.replace(report, known=0)),
        dtype=dtypes.pop() if len(dtypes) == 1 else "half",
    )


def _lines(rows: Sequence[Row], does: str, do: str) -> str:
    lines = len({(row.file, row.line) for row in rows})
    return f"{quantity(lines, 'line')} {does if lines == 1 else do}"


def _finding(row: Row, steps: int) -> Finding:
    is_loss = row.is_fault and row.kind in OF_NUMBERS
    half, fp32 = _values(row)
    return Finding(
        row=row,
        tone="bad" if is_loss else "warn" if row.is_fault else "note",
        icon=ICONS.get(row.kind, "edit"),
        seen=f"{count(row.count)} of {quantity(steps, 'step')}" if row.count else "",
        half=half,
        fp32=fp32,
        fits=_fits(row),
        evidence=_evidence(row, steps),
    )


def _values(row: Row) -> tuple[str, str]:
    """Return what stands in the line's columns: the value in half precision and in fp32."""
    if row.kind in ("overflow", "overflow_without_effect", "scale_too_large"):
        return "∞", number(row.value) if row.value is not None else ""
    if row.kind == "rounding":
        return ("0", number(row.value)) if row.value is not None else ("NaN or ∞", "")
    if row.kind == "gradients_underflow":
        parameters, all_ = row.elements
        whole = f"0 in {count(parameters)} of {quantity(all_, 'parameter')}"
        return whole if row.share is None else f"{percent(row.share)} is 0", ""
    if row.kind == "loss_differs":
        return number(row.loss), number(row.loss_fp32)
    if row.kind in NOT_LOST:  # what fp32 makes of a state that a step before has left is unknown
        return "NaN or ∞", "" if row.kind == "carried" else "NaN or ∞"
    return "", ""


def _fits(row: Row) -> Markup | str:
    if row.fits_below is not None:
        return scale(row.fits_below) if row.fits_below >= 1 else "no scale"
    if row.kind == "overflow":
        return "no scale"
    return "any scale" if row.kind in ANY_SCALE else ""


def _evidence(row: Row, steps: int) -> list[tuple[str, Markup | str]]:
    dtype = DTYPES.get(row.dtype, row.dtype)
    value = f"{number(row.value)} in fp32" if row.value is not None else ""
    if value and row.limit is not None and row.kind in ("overflow", "scale_too_large"):
        value += f", {dtype} ends at {number(row.limit)}"
    affected, elements = row.elements
    loss = f"{number(row.loss)}, " if row.loss is not None else ""
    loss += f"in fp32 {number(row.loss_fp32)}" if row.loss_fp32 is not None else ""
    fits = scale(row.fits_below) if row.fits_below is not None else ""
    parts = "Parameters" if row.kind == "gradients_underflow" else "Elements"
    rows = (
        ("Seen", _steps(row, steps) if row.count else ""),
        ("Value", value),
        (parts, f"{count(affected)} of {count(elements)}" if elements else ""),
        ("Loss", loss.removesuffix(", ")),
        ("Largest scale", fits),
        ("Gradient lost", percent(row.share) if row.share is not None else ""),
        ("Operator", with_code(f"`{row.operator}`") if row.operator else ""),
        ("Module", with_code(f"`{row.module}`") if row.module else ""),
    )
    return [(name, text) for name, text in rows if text]


def _steps(row: Row, total: int) -> str:
    shown = ", ".join(map(count, row.steps[:STEPS_SHOWN]))
    if row.count > STEPS_SHOWN:
        return f"{count(row.count)} of {quantity(total, 'step')}, the first ones {shown}"
    return f"step{'' if row.count == 1 else 's'} {shown} of {count(total)}"


def _tiles(report: Report, losses: Sequence[Row], calls: Sequence[Row]) -> list[Tile]:
    wrong = next((row for row in losses if None not in (row.loss, row.loss_fp32)), None)
    nonfinite = [
        row
        for row in report.rows
        if row.kind in NONFINITE | {"scale_too_large"} and row.symptom in ("loss", "gradient")
    ]
    steps = sorted({step for row in nonfinite for step in row.steps})
    has_more = any(row.count > len(row.steps) for row in nonfinite)
    fits = [row.fits_below for row in report.rows if row.fits_below is not None]
    shares = [row.share for row in report.rows if row.kind == "gradients_underflow" and row.share]
    tiles = []
    if wrong is not None:
        label = f"Loss in step {count(wrong.step)}" if wrong.step else "Loss"
        value = Markup("{} <small>in fp32</small> {}")
        value = value.format(number(wrong.loss), number(wrong.loss_fp32))
        tiles.append(Tile(label, value, below=_distance(wrong), is_lead=True))
    lines = sorted({row.line for row in losses if row.line})
    marked = len({(row.file, row.line) for row in losses})
    tiles += [
        Tile(
            "Lose precision",
            count(marked),
            "line" if marked == 1 else "lines",
            _list_numbers("line", lines),
            "bad" if losses else "",
        ),
        Tile(
            "Order of AMP calls",
            count(len(calls)),
            "mistake" if len(calls) == 1 else "mistakes",
            _list_numbers("line", sorted({row.line for row in calls if row.line})),
        ),
        Tile(
            "Nonfinite steps",
            f"{count(len(steps))}{'+' if has_more else ''}",
            f"of {count(report.steps)}",
            _list_numbers("step", steps),
        ),
    ]
    if fits:
        tiles.append(Tile("Largest scale that fits", scale(min(fits)), tone="scale"))
    if shares:
        tiles.append(Tile("Gradient lost", percent(max(shares)), "", "of its squared norm"))
    return tiles


def _distance(row: Row) -> str:
    """Return how far the loss is from that in fp32: "10.3 % too low"."""
    if row.loss is None or not row.loss_fp32:
        return ""
    share = (row.loss - row.loss_fp32) / abs(row.loss_fp32)
    if not math.isfinite(share):
        return ""
    return f"{percent(abs(share))} too {'high' if share > 0 else 'low'}"


def _list_numbers(word: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    shown = ", ".join(map(count, numbers[:STEPS_SHOWN]))
    more = f" and {count(len(numbers) - STEPS_SHOWN)} more" if len(numbers) > STEPS_SHOWN else ""
    return f"{word}{'' if len(numbers) == 1 else 's'} {shown}{more}"


def _sources(
    report: Report, findings: Sequence[Finding], sources: Mapping[str, str]
) -> list[Source]:
    """Return the files with findings, that of the script first, and last those without a line."""
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        by_file.setdefault(finding.row.file if finding.row.line > 0 else "", []).append(finding)
    order = sorted(by_file, key=lambda file: (not file, file != report.script))
    return [
        _source(file, by_file[file], sources.get(file), "" if index == 0 else f"F{index + 1}")
        for index, file in enumerate(order)
    ]


def _source(file: str, findings: Sequence[Finding], text: str | None, prefix: str) -> Source:
    texts = [] if text is None else lines_of(text)
    parts = parts_of(texts)
    marked: dict[int, list[Finding]] = {}
    for finding in findings:
        marked.setdefault(max(finding.row.line, 0), []).append(finding)

    def line(at: int) -> Line:
        found = marked.get(at, [])
        sources = [finding.row.source for finding in found]
        known = texts[at - 1] if 0 < at <= len(texts) else next(filter(None, sources), "")
        return Line(at, html_of(known, parts.get(at, []), sources), f"{prefix}L{at}", found)

    numbers = sorted({*range(1, len(texts) + 1), *marked})
    near = {at + by for at in marked for by in range(-CONTEXT, CONTEXT + 1)}
    blocks = []
    for is_near, group in groupby(numbers, near.__contains__):
        block = [line(at) for at in group]
        blocks.append((not is_near and len(block) > LEAST_FOLDED, block))
    return Source(file, len(texts), len(marked), blocks)
