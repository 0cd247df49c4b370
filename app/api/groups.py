"""Comparisons of one configuration in several precisions."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app import comparison
from app.auth import SignedIn
from app.context import Db, TheSettings
from app.parameters import RowId, RunId
from app.summary import Number, RunSummary
from db import runs

router = APIRouter(tags=["comparisons"])


class Figure(BaseModel):
    """A number; null is NaN or not measured yet. ratio: to the fp32 run's, or the first run's."""

    value: Number
    ratio: float | None


class ComparedRun(BaseModel):
    """One run. figures: run/step_ms, run/seconds, run/peak_memory_bytes, loss, and the recipe's
    last metrics.
    """

    label: str
    run: RunSummary
    device: Annotated[str, Field(description="What it trained on; empty until it has")]
    figures: dict[str, Figure]


class Comparison(BaseModel):
    """Runs side by side; differences: configuration fields with each run's value, in order."""

    id: int
    runs: list[ComparedRun]
    differences: Annotated[dict[str, list[Any]], Field(description="By path of the field")]
    left_out: Annotated[list[str], Field(description="Precisions that no worker offered")]


@router.post("/runs/{run_id}/comparison", status_code=201)
def compare(run_id: RunId, session: Db, settings: TheSettings, visitor: SignedIn) -> Comparison:
    """Queue a run's configuration and seed as fp32, fp16 without a scaler, fp16, and bf16.

    Precisions that no worker offers are left out, and named in the answer. Where all devices that
    may train it have TF32, fp32 comes a second time, with training.tf32.
    """
    queued = comparison.queue(session, visitor.user, runs.get(session, run_id))
    session.flush()
    return _comparison(session, queued[0].id, settings)


@router.get("/groups/{group_id}")
def get_comparison(
    group_id: RowId, session: Db, settings: TheSettings, _visitor: SignedIn
) -> Comparison:
    """Look at a comparison."""
    return _comparison(session, group_id, settings)


def _comparison(session: Db, group_id: RowId, settings: TheSettings) -> Comparison:
    laid_out = comparison.lay_out(session, group_id, settings)
    return Comparison(
        id=group_id,
        runs=[
            ComparedRun.model_validate(column, from_attributes=True) for column in laid_out.columns
        ],
        differences=dict(laid_out.differences),
        left_out=laid_out.left_out,
    )
