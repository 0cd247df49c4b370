"""What the filter of the list can be completed with."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db
from app.runs import filters
from db.runs import autocomplete
from db.runs.run_filters import NUMBERS, SYNONYMS

router = APIRouter(prefix="/runs", tags=["runs"])


class Words(BaseModel):
    """The words of a filter, and what there is to filter by: a bounded part, in order."""

    keys: Annotated[dict[str, str], Field(description="What stands before a colon, and behind it")]
    numbers: Annotated[list[str], Field(description="Columns that are compared")]
    settings: Annotated[list[str], Field(description="By name; by path where several have it")]
    metrics: list[str]
    values: Annotated[dict[str, list[str]], Field(description="Of keys")]


@router.get("/autocomplete")
@requires(SIGNED_IN)
def get_vocabulary(session: Db, _principal: SignedIn) -> Words:
    """List the words that a filter of runs can have, of the newest runs that you see."""
    known = autocomplete.vocabulary(session)
    return Words(
        keys=dict(filters.KEYS),
        numbers=[*NUMBERS, *SYNONYMS],
        settings=known.settings,
        metrics=known.metrics,
        values={
            "status": [*filters.STATUSES],
            "since": [*filters.TIMES],
            "before": [*filters.TIMES],
            "tag": known.tags,
            "precision": ["fp16", "bf16", "fp32", "fp8"],
            "recipe": known.recipes,
            "owner": ["me", *known.owners],
            "project": known.projects,
            "source": [*filters.SOURCES],
        },
    )
