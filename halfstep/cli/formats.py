"""Numbers, times and names as text in tables, as the pages show them."""

import math
from datetime import datetime
from typing import TYPE_CHECKING, cast

from halfstep.number_formats import UNKNOWN, count, duration, number, scale
from halfstep.run_labels import HEALTHS, STATES

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunSummary, StatusChange


def loss(run: "RunSummary") -> str:
    """Return the last known loss of a run; earlier servers have a NaN as null and a flag."""
    is_nan = run["loss"] is None and run.get("is_loss_nonfinite")
    return number(math.nan if is_nan else run["loss"])


def run_scale(run: "RunSummary") -> str:
    """Return the loss scale of a run that has a scaler."""
    return scale(run["scale"]) if run["is_scaled"] else UNKNOWN


def moment(seconds: float | None) -> str:
    """Return a time of the server in the local time zone."""
    return UNKNOWN if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def progress(run: "RunSummary") -> str:
    """Return the steps of a run: 488/3,000."""
    total = f"/{count(run['steps_total'])}" if run["steps_total"] else ""
    return f"{count(run['step'])}{total}"


def state(run: "RunSummary") -> str:
    """Return the state of a run as on its page: its outcome if it has one."""
    text = label(str(run.get("outcome") or run["status"]))
    return f"{text}, damaged" if run.get("damage") else text


def label(status: str) -> str:
    """Return the label of a status or an outcome; a newer server may have others."""
    return STATES.get(status, status).lower()


def health(run: "RunSummary") -> str:
    """Return the loss-scale health of a run."""
    known = run.get("health")
    return HEALTHS.get(known["word"], known["word"]).lower() if known else UNKNOWN


def format_skipped(run: "RunSummary") -> str:
    """Return the number of skipped steps; unknown without steps."""
    return count(run["skipped"]) if run["own_steps"] else UNKNOWN


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
    parts += [f"loss {loss(run)}"] if loss(run) != UNKNOWN else []
    parts += [f"scale {run_scale(run)}"] if run["scale"] is not None and run["is_scaled"] else []
    parts += [f"skipped {format_skipped(run)}"] if run["own_steps"] else []
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
