"""Media of other loggers: which files are read, and their converted form."""

import csv
import io
import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from halfstep.session.logged_values import MOST_BINS, MOST_BYTES

#: By first bytes: the formats that browsers show.
BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "wav"}
#: Files per run.
MOST = 1000
SUFFIX = re.compile(r"[A-Za-z0-9]{1,16}")
#: Tolerance of bin widths, relative to the mean: edges are written rounded.
ROUNDED = 1e-3


def suffix_of(content: bytes) -> str | None:
    """Return the suffix for the content's format; None if pages cannot show it."""
    suffixes = (suffix for start, suffix in BEGINNINGS.items() if content.startswith(start))
    suffix = next(suffixes, None)
    return None if suffix == "wav" and content[8:12] != b"WAVE" else suffix


def named_suffix_of(path: str, content: bytes) -> str:
    """Return a file name's suffix, else that of the content's format, else "bin"."""
    suffix = Path(path).suffix.removeprefix(".")
    return suffix if SUFFIX.fullmatch(suffix) else suffix_of(content) or "bin"


def histogram_of(edges: object, counts: object) -> bytes | None:
    """Return a histogram as JSON in the format of `halfstep.Histogram`; None if it is invalid.

    edges: one more than counts, evenly spaced: our format has no others.
    """
    if not (isinstance(edges, list) and isinstance(counts, list)):
        return None
    if not 1 <= len(counts) <= MOST_BINS or len(edges) != len(counts) + 1:
        return None
    if not all(map(_is_finite, [*edges, *counts])) or min(counts) < 0:
        return None
    width = (edges[-1] - edges[0]) / len(counts)
    if not all(abs(b - a - width) <= ROUNDED * width for a, b in pairwise(edges)) or width <= 0:
        return None
    histogram = {"lowest": float(edges[0]), "highest": float(edges[-1])}
    whole = [int(count) if count == int(count) else float(count) for count in counts]
    return json.dumps(histogram | {"counts": whole, "nonfinite": 0}).encode()


def table_of(columns: object, rows: object) -> bytes | None:
    """Return a table as CSV; None if it is invalid. Nested cells become JSON."""
    if not (isinstance(columns, list) and isinstance(rows, list)):
        return None
    if not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        return None
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(_cell, columns))
    writer.writerows(map(_cell, row) for row in rows)
    return text.getvalue().encode(errors="backslashreplace")


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict | list) else value


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max and math.isfinite(value)


def read(folder: Path, path: str) -> bytes | None:
    """Return a file inside a run's folder; None if it is outside, too large or missing."""
    try:
        place = inside(folder, path)
        if place is None or not place.is_file():
            return None
        return place.read_bytes() if place.stat().st_size <= MOST_BYTES else None
    except OSError:
        return None


def inside(folder: Path, path: str) -> Path | None:
    """Resolve a path within a folder; None if it leads outside.

    A folder that is itself a symlink counts as outside.
    """
    try:
        root, place = folder.resolve(), (folder / path).resolve()
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL, a loop of links
        return None
    return place if place.is_relative_to(root) and not folder.is_symlink() else None
