"""Numbers, times and names as text in tables, as the pages show them."""

import json
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunSummary, StatusChange


MISSING = "–"


def number(value: Any) -> str:
    """Return a number with four significant digits; the API has infinities as words."""
    if value is None:
        return MISSING
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def scale(value: Any) -> str:
    """Return a loss scale: a power of two as 2^19, as the filter has it."""
    if value is None or not math.isfinite(float(value)) or float(value) <= 0:
        return number(value)
    mantissa, exponent = math.frexp(float(value))
    return f"2^{exponent - 1}" if mantissa == 0.5 else number(value)


def run_scale(run: "RunSummary") -> str:
    """Return the loss scale of a run that has a scaler."""
    return scale(run["scale"]) if run["is_scaled"] else MISSING


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units, short enough for a column: 5h 36m."""
    if seconds is None:
        return MISSING
    if seconds < 10:
        return f"{max(seconds, 0):.1f}s"
    whole = round(seconds)
    for size, unit, part, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part}{part_unit}"
    return f"{whole // 60}m {whole % 60}s" if whole >= 60 else f"{whole}s"


def size(size_bytes: float) -> str:
    """Return the size of a file in the unit that fits."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size_bytes < 1000:
            break
        size_bytes, unit = size_bytes / 1000, larger
    return f"{size_bytes:.3g} {unit}" if size_bytes < 1000 else f"{size_bytes:,.0f} {unit}"


def moment(seconds: float | None) -> str:
    """Return a time of the server in the local time zone."""
    return MISSING if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def value(setting: Any) -> str:
    """Return a value of a configuration as JSON has it; a text without quotes."""
    if isinstance(setting, float):
        return f"{setting:g}"
    return setting if isinstance(setting, str) else json.dumps(setting, ensure_ascii=False)


def progress(run: "RunSummary") -> str:
    """Return the steps of a run: 488/3,000."""
    total = f"/{run['steps_total']:,}" if run["steps_total"] else ""
    return f"{run['step']:,}{total}"


def state(run: "RunSummary") -> str:
    """Return the state of a run by the words of the filter: its outcome if it has one."""
    return str(run.get("outcome") or run["status"])


def health(run: "RunSummary") -> str:
    """Return the loss-scale health of a run."""
    known = run.get("health")
    return known["word"] if known else MISSING


def reason(run: "RunSummary") -> str:
    """Return why a run waits, or why it failed: by its history, else the last line of its error."""
    if run["status"] != "failed":
        return str(run.get("waiting") or "")
    statuses = cast("list[StatusChange]", run.get("statuses", []))  # of one run, not in lists
    ends = (row for row in statuses if row["status"] == "failed")
    history = [row["reason"] for row in ends if row["attempt"] == run["attempt"]]
    lines = [line.strip() for line in (run["error"] or "").splitlines() if line.strip()]
    return str(next(filter(None, [*history[:1], *lines[-1:]]), ""))


def run_line(run: "RunSummary") -> str:
    """Return the status of a run on one line."""
    parts = [f"run {run['id']}  {state(run)}", run["name"], f"step {progress(run)}"]
    parts += [f"loss {number(run['loss'])}"] if run["loss"] is not None else []
    parts += [f"scale {run_scale(run)}"] if run["scale"] is not None and run["is_scaled"] else []
    parts += [f"skipped {run['skipped']:,}"]
    parts += [health(run)] if run.get("health") else []
    left = run.get("seconds_left")
    parts += [f"ETA {duration(left)}"] if left is not None else []
    why = reason(run)
    return "  ".join(parts) + (f"  ({why})" if why else "")


def plain(text: str) -> str:
    """Return text on one line, without control characters, which a terminal would interpret."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
