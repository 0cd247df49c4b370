"""The recipes that workers offer, each with its settings; those that could not be loaded, too."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db
from app.html.rendering import page
from app.http.parameters import Text
from app.submission import config_schema
from app.submission.config_schema import Property
from db.errors import NotFound
from db.queue import workers
from db.tables import Worker

router = APIRouter()

#: What a recipe's worker need not say.
UNTOLD: dict[str, Any] = {"file": "", "package": "", "place": "", "check": None}


@dataclass
class Offered:
    """A recipe as the first of its workers has it. alike: whether all have the same settings."""

    recipe: dict[str, Any]
    workers: list[str] = field(default_factory=list)
    alike: bool = True

    @property
    def own(self) -> list[Property]:
        """The settings that the recipe itself has."""
        return [each for each in self.properties if each.group == "recipe"]

    @property
    def properties(self) -> list[Property]:
        """All settings, the recipe's own first."""
        found = config_schema.properties(self.recipe.get("schema", {}))
        return sorted(found, key=lambda each: each.group != "recipe")


@router.get("/recipes")
@requires(SIGNED_IN)
def list_recipes(request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show what can be trained now, where it comes from, and what could not be loaded."""
    up = [worker for worker, is_alive in workers.everyone(session) if is_alive]
    offered = by_name(up)
    return page(
        request,
        "submission/recipes.html",
        principal=principal,
        up=up,
        broken=[each for each in offered if "error" in each.recipe],
        lacking=[each for each in offered if "needs" in each.recipe],
        offered=[each for each in offered if "schema" in each.recipe],
    )


@router.get("/recipes/{name:path}")
@requires(SIGNED_IN)
def show_recipe(name: Text, request: Request, session: Db, principal: SignedIn) -> HTMLResponse:
    """Show one with all of its settings. Raises NotFound."""
    up = [worker for worker, is_alive in workers.everyone(session) if is_alive]
    offered = [each for each in by_name(up) if "schema" in each.recipe]
    found = workers.named([each.recipe for each in offered], name)
    if found is None:
        known = ", ".join(each.recipe["name"] for each in offered) or "none: no worker is up"
        raise NotFound(f"No worker that is up offers the recipe {name!r}. They offer: {known}.")
    each = next(each for each in offered if each.recipe is found)
    return page(request, "submission/recipe.html", principal=principal, each=each)


def by_name(up: Iterable[Worker]) -> list[Offered]:
    """Return each recipe once, in order of title, with the workers that have it in that state."""
    found: dict[tuple[str, ...], Offered] = {}
    for worker in up:
        for recipe in worker.recipes:
            told = recipe.get("error") or recipe.get("needs") or ""
            offered = found.setdefault((recipe["name"], told), Offered(UNTOLD | recipe))
            offered.workers.append(worker.name)
            offered.alike &= recipe.get("schema") == offered.recipe.get("schema")
    return sorted(found.values(), key=_title)


def _title(each: Offered) -> tuple[str, str]:
    return str(each.recipe.get("title") or each.recipe["name"]).casefold(), each.recipe["name"]
