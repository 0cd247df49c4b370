"""Helpers that make steps and events as a training spools them, and record them."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.database import Database
from db.tables import (
    LatestMetric,
    LossCurve,
    MetricBlock,
    MetricTail,
    Run,
    ScalerEvent,
    Step,
    StepBlock,
    StepBucket,
)
from db.telemetry import metric_blocks, telemetry
from db.telemetry.metric_blocks import Point
from halfstep.telemetry import events as spooled
from halfstep.telemetry.events import StepEvent
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.plain_json import json_safe
from halfstep.telemetry.spool import STEP_DTYPE
from tests.spool_made import event_of


def make_steps(
    losses: Sequence[float], *, first: int = 1, skipped: Collection[int] = ()
) -> NDArray[Any]:
    """Make steps from `first` on, one for each loss.

    A skipped step has an infinite norm, and changes the scale for the next step.
    """
    steps = np.zeros(len(losses), STEP_DTYPE)
    step = np.arange(first, first + len(losses))
    steps["step"], steps["elapsed_ms"], steps["step_us"] = step, step * 5, 5000 + step % 7
    steps["data_us"] = step % 11 * 40
    steps["loss"], steps["lr"] = losses, 0.1 / step
    steps["scale"] = scale_at(step, skipped)
    steps["grad_norm"] = 1 + step % 5
    steps["grad_norm_clipped"] = np.minimum(steps["grad_norm"], 3)
    lost = np.isin(step, list(skipped))
    steps["flags"][lost] = SKIPPED
    steps["grad_norm"][lost] = np.inf
    steps["grad_norm_clipped"][lost] = np.nan
    return steps


def scale_at(step: Any, skipped: Collection[int]) -> Any:
    """Return the scale used for a step: each skip changes it to another of 20 powers of two."""
    return 2.0 ** (20 - np.searchsorted(sorted(skipped), step) % 20)


def make_events(skipped: Collection[int]) -> list[dict[str, Any]]:
    """Make the two events of each skipped step."""
    return [
        {
            "event": "scaler",
            "kind": kind,
            "step": step,
            "optimizer": optimizer,
            "scale_before": scale_at(step, skipped),
            "scale_after": scale_at(step + 1, skipped),
            "culprits": [],
        }
        for step in sorted(skipped)
        for kind, optimizer in (("skip", "SGD"), ("backoff", None))
    ]


def make_metric(step: int, value: Any, name: str = "val/accuracy") -> dict[str, Any]:
    """Make the event of one metric."""
    return {"event": "metric", "step": step, "name": name, "value": value, "elapsed_ms": step * 5}


def record(
    database: Database,
    run: Run,
    *batches: NDArray[Any],
    events: Sequence[dict[str, Any]] = (),
) -> None:
    """Record batches, each in a transaction of its own, then events in another one."""
    flushes = [telemetry.Flush(steps=[batch]) for batch in batches]
    for flush in (*flushes, telemetry.Flush(events=[step_event(each) for each in events])):
        with database.writing() as session:
            telemetry.record(session, run.id, run.attempt, flush)


def step_event(fields: dict[str, Any]) -> StepEvent:
    """Return the event with these fields."""
    if fields["event"] == "metric":  # the database has room for more than a spool
        return spooled.Metric(**{name: value for name, value in fields.items() if name != "event"})
    event = event_of(json_safe(fields))
    assert isinstance(event, StepEvent)
    return event


def read_logged_points(
    session: Session, run_id: int | None = None, name: str | None = None
) -> list[Point]:
    """Return the points of metrics by run, name and step, of one run or all."""
    run_ids = session.scalars(select(Run.id).order_by(Run.id)) if run_id is None else [run_id]
    points = [
        point
        for each in run_ids
        for point in metric_blocks.page(session.connection(), each, limit=10**6)
    ]
    return [point for point in points if name is None or point.name == name]


def forget(database: Database, run: Run) -> None:
    """Delete all rows of a run, for the next example of a property test."""
    with database.writing() as session:
        of_steps = (Step, StepBlock, StepBucket, LossCurve)
        for table in (*of_steps, MetricBlock, MetricTail, LatestMetric, ScalerEvent):
            session.execute(delete(table).where(table.run_id == run.id))


def make_skip(step: int, *names: str, **changes: Any) -> dict[str, Any]:
    """Make the event of a skip, with these parameters as culprits."""
    event = {
        "event": "scaler",
        "kind": "skip",
        "step": step,
        "optimizer": "adamw",
        "scale_before": 2.0**20,
        "scale_after": 2.0**19,
        "culprits": [{"name": name, "inf": 3, "nan": 1} for name in names],
        "loss_nonfinite": False,
    }
    return event | changes


def make_module(name: str, lowest: int, counts: list[int], **changes: Any) -> dict[str, Any]:
    """Make one module of a histogram."""
    module = {"name": name, "lowest_exponent": lowest, "counts": counts, "zeros": 0, "nonfinite": 0}
    return module | {"underflow": 0.0, "near_overflow": 0.0} | changes


def make_histogram(step: int, *modules: dict[str, Any], scale: float = 2.0**16) -> dict[str, Any]:
    """Return a histogram event."""
    return {"event": "histogram", "step": step, "scale": scale, "modules": list(modules)}


def make_headroom(step: int, **modules: tuple[Any, Any]) -> dict[str, Any]:
    """Return a measurement of modules' largest activations and gradients, as from a spool."""
    evaluated_at = [
        {"name": name, "activation": activation, "gradient": gradient}
        for name, (activation, gradient) in modules.items()
    ]
    return {"event": "headroom", "step": step, "scale": 1024.0, "modules": evaluated_at}


def make_replay(step: int, **changes: Any) -> dict[str, Any]:
    """Make the event of a replay that found the head's backward pass."""
    event = {
        "event": "replay",
        "step": step,
        "exact": True,
        "notes": [],
        "requested": False,
        "scale": 2.0**20,
        "found": True,
        "module": "model.head",
        "direction": "backward",
        "operation": "AddmmBackward0",
        "dtype": "torch.float16",
        "largest_input": 70123.0,
        "limit": 65504.0,
        "loss_nonfinite": False,
    }
    return event | changes


def make_precision_row(name: str, **changes: Any) -> dict[str, Any]:
    """Make a row of a precision diff with the errors of a healthy module."""
    row = {
        "name": name,
        "type": "Linear",
        "call": 1,
        "direction": "forward",
        "dtype": "float16",
        "elements": 4096,
        "error": 5e-4,
        "largest": 3e-3,
        "cosine": 1.0,
        "flushed": 0.0,
        "saturated": 0.0,
        "bits": 11.0,
        "local": 3e-4,
        "inherited": 4e-4,
        "local_flushed": 0.0,
        "local_saturated": 0.0,
        "local_fp32": None,
        "used_by": [],
        "unknown": None,
    }
    return row | changes


def make_plan_point(precision: str = "fp16", **fields: Any) -> dict[str, Any]:
    """Return a point of a precision plan."""
    return {
        "precision": precision,
        "fp32": [],
        "bf16": [],
        "is_loss_in_fp32": False,
        "init_scale": 65536.0 if precision == "fp16" else None,
        "error": 0.0086,
        "by_weights": {"fresh weights": 0.0086, "step 100": 0.0011},
        "cosine": 0.99996,
        "is_within": True,
        "time": 0.12,
        "memory": 0.6,
        "ms": None,
    } | fields


def make_plan_module() -> dict[str, Any]:
    """Return a module of a plan, which overflows in fp16."""
    return {
        "role": "model.head",
        "names": ["model.head"],
        "type": "Linear",
        "errors": {"fp16": math.inf, "bf16": 0.0051},
        "operations": 0.25,
        "memory": 0.5,
        "ms": None,
    }


def make_precision_plan(**fields: Any) -> dict[str, Any]:
    """Return the event of a plan: fp16 within the bounds only with its head in fp32."""
    bad = {"error": math.inf, "cosine": math.nan, "is_within": False, "time": 0.1}
    exact = {"error": 0.0, "by_weights": {}, "cosine": 1.0, "time": 1.0, "memory": 1.0}
    mixed = make_plan_point(fp32=["model.head"])
    return {
        "event": "precision_plan",
        "step": 0,
        "max_error": 0.1,
        "min_cosine": 0.99,
        "batches": 4,
        "cost": "operations",
        "device": "cpu",
        "fp32_cost": 8.0,
        "batch_deviation": 0.81,
        "points": [make_plan_point(**bad), mixed, make_plan_point("fp32", **exact)],
        "of_precision": {"fp16": mixed},
        "modules": [make_plan_module()],
        "notes": [],
    } | fields


def make_precision_diff(step: int, **changes: Any) -> dict[str, Any]:
    """Make the event of a precision diff that suggests fp32 for one module."""
    nonfinite = {"error": float("inf"), "local": float("inf"), "local_saturated": 0.5}
    event = {
        "event": "precision_diff",
        "step": step,
        "dtype": "float16",
        "reference": "float32",
        "scale": 1024.0,
        "loss": 2.5,
        "reference_loss": 2.501,
        "error": float("inf"),
        "cosine": float("nan"),
        "suggested": ["head"],
        "suggested_error": 5e-4,
        "notes": [],
        "causes": [make_plan_module() | {"errors": {"fp16": math.inf}}],
        "rows": [
            make_precision_row("(loss)", type="", dtype="float32"),
            make_precision_row("body"),
            make_precision_row("body", direction="backward", error=2e-3),
            make_precision_row("head", **nonfinite, local_fp32=1e-4),
            make_precision_row("head", direction="backward", local=None, inherited=None)
            | {"unknown": "one of its inputs exceeds the format's largest number"},
            make_precision_row("head.weight", direction="parameter", call=0, used_by=["head"]),
        ],
    }
    return event | changes
