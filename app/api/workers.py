"""Workers, and the recipes that they offer."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

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
    versions: dict[str, Any]
    started_at: float
    seen_at: float


@router.get("/workers")
def list_workers(session: Db, _visitor: SignedIn) -> list[WorkerState]:
    """List workers; those that are silent are not alive."""
    return [
        WorkerState.model_validate({**vars(worker), "alive": alive})
        for worker, alive in workers.everyone(session)
    ]


@router.get("/recipes")
def list_recipes(session: Db, _visitor: SignedIn) -> list[dict[str, Any]]:
    """List the recipes that can be submitted, each with the JSON Schema of its configuration."""
    return workers.recipes(session)
