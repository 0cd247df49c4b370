"""Where the gradients of a run lay, step by step, as the training counted their exponents."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import Diagnosis


def newest(session: Session, run_id: int) -> Diagnosis | None:
    """Return the last histogram of a run."""
    query = select(Diagnosis).where(Diagnosis.run_id == run_id, Diagnosis.kind == "histogram")
    return session.scalar(query.order_by(Diagnosis.step.desc()).limit(1))


def of_module(
    session: Session, run_id: int, module: str | None, *, most: int
) -> list[dict[str, Any]]:
    """Return samples in order of step, evenly thinned to about `most`, the last one always there.

    module: None for all of them together. A sample has step, scale, lowest_exponent, counts (one
    an exponent, upwards), zeros and nonfinite.
    """
    mine = (Diagnosis.run_id == run_id, Diagnosis.kind == "histogram")
    steps = session.scalars(select(Diagnosis.step).where(*mine).order_by(Diagnosis.step)).all()
    chosen = steps[:: -(-len(steps) // most) or 1]
    if steps and chosen[-1] != steps[-1]:
        chosen = [*chosen, steps[-1]]
    query = select(Diagnosis).where(*mine, Diagnosis.step.in_(chosen)).order_by(Diagnosis.step)
    return [
        {"step": row.step, "scale": row.content["scale"]}
        | together([each for each in row.content["modules"] if module in (None, each["name"])])
        for row in session.scalars(query)
    ]


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
