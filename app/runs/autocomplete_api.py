"""Route of completions for the filter of the list."""

from typing import Annotated

from pydantic import BaseModel, Field

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db
from app.runs import filters
from db.runs import autocomplete
from db.runs.run_filters import NUMBERS, SYNONYMS

router = Router(prefix="/runs", tags=["runs"])


class Completions(BaseModel):
    """Keys, columns, names and values that a filter can contain, sorted and bounded."""

    keys: Annotated[dict[str, str], Field(description="Key before a colon, and its allowed values")]
    numbers: Annotated[list[str], Field(description="Columns that can be compared with a number")]
    settings: Annotated[
        list[str], Field(description="Names; paths where several settings share a name")
    ]
    metrics: list[str]
    values: Annotated[dict[str, list[str]], Field(description="Values of each key")]


@router.get("/autocomplete", SIGNED_IN)
def get_completions(session: Db) -> Completions:
    """List completions for a filter, from the newest runs that you can view."""
    vocabulary = autocomplete.vocabulary(session)
    return Completions(
        keys=dict(filters.KEYS),
        numbers=[*NUMBERS, *SYNONYMS],
        settings=vocabulary.settings,
        metrics=vocabulary.metrics,
        values={
            "status": [*filters.STATUSES],
            "since": [*filters.TIMES],
            "before": [*filters.TIMES],
            "tag": vocabulary.tags,
            "precision": ["fp16", "bf16", "fp32", "fp8"],
            "recipe": vocabulary.recipes,
            "owner": ["me", *vocabulary.owners],
            "project": vocabulary.projects,
            "source": [*filters.SOURCES],
        },
    )
