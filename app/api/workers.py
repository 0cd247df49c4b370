"""Workers, and the recipes that they offer."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.api.lists import After, Limit, ListPage
from app.auth import SignedIn
from app.context import Db
from db import workers

router = APIRouter(tags=["workers"])


class WorkerState(BaseModel):
    """A machine that trains."""

    id: int
    name: str
    host: str
    alive: bool
    devices: list[dict[str, Any]]
    recipes: list[dict[str, Any]]
    offers_commands: Annotated[bool, Field(description="Whether it runs command lines")]
    walls_stand: Annotated[
        bool,
        Field(description="Whether its runs can neither open what is private nor see processes"),
    ]
    versions: dict[str, Any]
    started_at: float
    seen_at: float


class Workers(ListPage):
    """Workers, in the order in which they came."""

    workers: list[WorkerState]


@router.get("/workers")
def list_workers(
    session: Db, _visitor: SignedIn, after: After = "", limit: Limit = 1000
) -> Workers:
    """List workers; those that are silent are not alive."""
    found = workers.page_of_everyone(session, after=after, limit=limit)
    states = [
        WorkerState.model_validate({**vars(worker), "alive": alive}) for worker, alive in found.rows
    ]
    return Workers(workers=states, total=found.total, next=found.next)


@router.get("/recipes")
def list_recipes(session: Db, _visitor: SignedIn) -> list[dict[str, Any]]:
    """List the recipes that can be submitted, each with the JSON Schema of its configuration."""
    return workers.recipes(session)
