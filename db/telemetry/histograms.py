"""Numeric diagnoses of a run by step: exponents, layer norms, headroom, lost updates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import Diagnosis

LARGEST_FP16 = 65504.0
LARGEST_OF = ("activation", "gradient")  # of a module, in a look at the headroom


def newest(session: Session, run_id: int, kind: str = "histogram") -> Diagnosis | None:
    """Return the last histogram of a run, or its last diagnosis of another kind."""
    query = select(Diagnosis).where(Diagnosis.run_id == run_id, Diagnosis.kind == kind)
    return session.scalar(query.order_by(Diagnosis.step.desc()).limit(1))


def earliest(session: Session, run_id: int, kind: str) -> Diagnosis | None:
    """Return the first diagnosis of a kind, of those steps that count."""
    query = select(Diagnosis).where(Diagnosis.run_id == run_id, Diagnosis.kind == kind)
    return session.scalar(query.order_by(Diagnosis.step).limit(1))


def of_module(
    session: Session, run_id: int, module: str | None, *, most: int
) -> list[dict[str, Any]]:
    """Return samples in order of step, evenly thinned to about `most`, the last one always there.

    module: None for all of them together. A sample has step, scale, lowest_exponent, counts (one
    an exponent, upwards), zeros and nonfinite.
    """
    return [
        {"step": row.step, "scale": row.content["scale"]}
        | together([each for each in row.content["modules"] if module in (None, each["name"])])
        for row in _thinned(session, run_id, "histogram", most)
    ]


def layer_norms(session: Session, run_id: int, *, most: int) -> dict[str, Any]:
    """Return steps, layers in forward order and norms, a list a layer, thinned as samples are.

    A norm is an L2 norm of unscaled gradients, before the clip; None where a layer was not there.
    """
    rows = _thinned(session, run_id, "layer_norms", most)
    norms = [dict(zip(row.content["layers"], row.content["norms"], strict=True)) for row in rows]
    layers = list(dict.fromkeys(name for each in norms for name in each))
    return {
        "steps": [row.step for row in rows],
        "layers": layers,
        "norms": [[each.get(name) for each in norms] for name in layers],
    }


def headroom(session: Session, run_id: int) -> dict[str, Any] | None:
    """Return the latest headroom: step, scale, and modules, those with the least first.

    A module has name, the largest activation and gradient (times the scale), and left: how many
    powers of two both are below fp16's largest number, below 0 beyond it, None if all was zero; and
    smallest_activation, smallest_gradient where they were measured.
    """
    newest_look = newest(session, run_id, "headroom")
    if newest_look is None:
        return None
    modules = [
        {**each, "left": _left_of(each)} | dict(zip(LARGEST_OF, _largest(each), strict=True))
        for each in newest_look.content["modules"]
    ]
    modules.sort(key=lambda module: math.inf if module["left"] is None else module["left"])
    return newest_look.content | {"modules": modules}


def headroom_by_step(session: Session, run_id: int, *, most: int) -> dict[str, Any]:
    """Return steps, modules in forward order and left, a list a module, thinned as samples are.

    left: as of `headroom`; None also where a module was not there.
    """
    rows = _thinned(session, run_id, "headroom", most)
    looks = [{each["name"]: _left_of(each) for each in row.content["modules"]} for row in rows]
    modules = list(dict.fromkeys(name for look in looks for name in look))
    return {
        "steps": [row.step for row in rows],
        "modules": modules,
        "left": [[look.get(name) for look in looks] for name in modules],
    }


def updates(session: Session, run_id: int) -> dict[str, Any] | None:
    """Return the last count of updates that round away: step, and modules, those that lose most
    first, each with name, wanted, lost and share.
    """
    newest_count = newest(session, run_id, "updates")
    if newest_count is None:
        return None
    modules = [
        {**each, "share": each["lost"] / each["wanted"]}
        for each in newest_count.content["modules"]
        if each["wanted"]
    ]
    modules.sort(key=lambda module: -float(module["share"]))
    return newest_count.content | {"modules": modules}


def _largest(module: Mapping[str, Any]) -> list[float]:
    return [float(module[kind] or 0) for kind in LARGEST_OF]


def _left_of(module: Mapping[str, Any]) -> float | None:
    largest = _largest(module)
    if any(math.isnan(number) for number in largest):
        return -math.inf
    most = max(largest)
    return math.log2(LARGEST_FP16 / most) if 0 < most < math.inf else -math.inf if most else None


def _thinned(session: Session, run_id: int, kind: str, most: int) -> Sequence[Diagnosis]:
    mine = (Diagnosis.run_id == run_id, Diagnosis.kind == kind)
    steps = session.scalars(select(Diagnosis.step).where(*mine).order_by(Diagnosis.step)).all()
    chosen = steps[:: -(-len(steps) // most) or 1]
    if steps and chosen[-1] != steps[-1]:
        chosen = [*chosen, steps[-1]]
    query = select(Diagnosis).where(*mine, Diagnosis.step.in_(chosen)).order_by(Diagnosis.step)
    return session.scalars(query).all()


def together(modules: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of modules, exponent by exponent."""
    filled = [each for each in modules if each["counts"]]
    lowest = min((each["lowest_exponent"] for each in filled), default=0)
    end = max((each["lowest_exponent"] + len(each["counts"]) for each in filled), default=0)
    counts = [0] * (end - lowest)
    for each in filled:
        for exponent, count in enumerate(each["counts"], each["lowest_exponent"]):
            counts[exponent - lowest] += count
    return {
        "lowest_exponent": lowest,
        "counts": counts,
        "zeros": sum(each["zeros"] for each in modules),
        "nonfinite": sum(each["nonfinite"] for each in modules),
    }
