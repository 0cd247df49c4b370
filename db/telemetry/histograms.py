"""Numeric diagnoses of a run by step: exponents, layer norms, headroom, updates."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import Diagnosis

LARGEST_FP16 = 65504.0
LARGEST_OF = ("activation", "gradient")  # maxima of a module in a headroom measurement


def newest(session: Session, run_id: int, kind: str = "histogram") -> Diagnosis | None:
    """Return the latest diagnosis of a kind of a run, by default a histogram."""
    query = select(Diagnosis).where(Diagnosis.run_id == run_id, Diagnosis.kind == kind)
    return session.scalar(query.order_by(Diagnosis.step.desc()).limit(1))


def of_module(
    session: Session, run_id: int, module: str | None, *, most: int
) -> list[dict[str, object]]:
    """Return about `most` evenly spaced histogram samples by step, including the last.

    module: None for the sum of all modules. A sample has step, scale, lowest_exponent, counts (one
    per exponent, ascending), zeros and nonfinite.
    """
    return [
        {"step": row.step, "scale": row.content["scale"]}
        | together(
            [
                module_row
                for module_row in row.content["modules"]
                if module in (None, module_row["name"])
            ]
        )
        for row in _thin(session, run_id, "histogram", most)
    ]


def layer_norms(session: Session, run_id: int, *, most: int) -> dict[str, object]:
    """Return steps, layers in forward order and one list of norms per layer.

    Steps are thinned to about `most`. A norm is the L2 norm of unscaled gradients before clipping;
    None where the layer is missing.
    """
    rows = _thin(session, run_id, "layer_norms", most)
    norms = [dict(zip(row.content["layers"], row.content["norms"], strict=True)) for row in rows]
    layers = list(dict.fromkeys(name for norm in norms for name in norm))
    return {
        "steps": [row.step for row in rows],
        "layers": layers,
        "norms": [[norm.get(name) for norm in norms] for name in layers],
    }


def headroom(session: Session, run_id: int) -> dict[str, object] | None:
    """Return the latest headroom measurement: step, scale and modules, least headroom first.

    A module has name, the largest activation and gradient (times the scale), and left: the number
    of powers of two between the larger one and fp16's largest number, negative above it, None if
    all was zero; and smallest_activation, smallest_gradient where they were measured.
    """
    latest = newest(session, run_id, "headroom")
    if latest is None:
        return None
    modules = [
        {**row, "left": _bits_left(row)} | dict(zip(LARGEST_OF, _largest(row), strict=True))
        for row in latest.content["modules"]
    ]
    modules.sort(key=lambda module: math.inf if module["left"] is None else module["left"])
    return latest.content | {"modules": modules}


def headroom_by_step(session: Session, run_id: int, *, most: int) -> dict[str, object]:
    """Return steps, modules in forward order and one list of `left` per module.

    Steps are thinned to about `most`. left: as in `headroom`; None also where the module is
    missing.
    """
    rows = _thin(session, run_id, "headroom", most)
    measurements = [
        {module["name"]: _bits_left(module) for module in row.content["modules"]} for row in rows
    ]
    modules = list(dict.fromkeys(name for measurement in measurements for name in measurement))
    return {
        "steps": [row.step for row in rows],
        "modules": modules,
        "left": [[measurement.get(name) for measurement in measurements] for name in modules],
    }


def updates(session: Session, run_id: int) -> dict[str, object] | None:
    """Return the latest count of weight updates lost to rounding, by module.

    Contains step and modules, largest share of lost updates first; each has name, wanted, lost and
    share.
    """
    newest_count = newest(session, run_id, "updates")
    if newest_count is None:
        return None
    modules = [
        {**row, "share": row["lost"] / row["wanted"]}
        for row in newest_count.content["modules"]
        if row["wanted"]
    ]
    modules.sort(key=lambda module: -float(module["share"]))
    return newest_count.content | {"modules": modules}


#: Functions that return the latest measurement that a run's page has as a table, by kind.
MEASURED: Mapping[str, Callable[[Session, int], object]] = {
    "headroom": headroom,
    "fp8": partial(newest, kind="fp8"),
    "updates": updates,
}


def _largest(module: Mapping[str, Any]) -> list[float]:
    return [float(module[kind] or 0) for kind in LARGEST_OF]


def _bits_left(module: Mapping[str, object]) -> float | None:
    largest = _largest(module)
    if any(math.isnan(number) for number in largest):
        return -math.inf
    most = max(largest)
    return math.log2(LARGEST_FP16 / most) if 0 < most < math.inf else -math.inf if most else None


def _thin(session: Session, run_id: int, kind: str, most: int) -> Sequence[Diagnosis]:
    mine = (Diagnosis.run_id == run_id, Diagnosis.kind == kind)
    steps = session.scalars(select(Diagnosis.step).where(*mine).order_by(Diagnosis.step)).all()
    chosen = steps[:: -(-len(steps) // most) or 1]
    if steps and chosen[-1] != steps[-1]:
        chosen = [*chosen, steps[-1]]
    query = select(Diagnosis).where(*mine, Diagnosis.step.in_(chosen)).order_by(Diagnosis.step)
    return session.scalars(query).all()


def together(modules: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Add up the histogram counts of modules per exponent."""
    filled = [module for module in modules if module["counts"]]
    lowest = min((module["lowest_exponent"] for module in filled), default=0)
    end = max((module["lowest_exponent"] + len(module["counts"]) for module in filled), default=0)
    counts = [0] * (end - lowest)
    for module in filled:
        for exponent, count in enumerate(module["counts"], module["lowest_exponent"]):
            counts[exponent - lowest] += count
    return {
        "lowest_exponent": lowest,
        "counts": counts,
        "zeros": sum(module["zeros"] for module in modules),
        "nonfinite": sum(module["nonfinite"] for module in modules),
    }
