"""Pages of the recipes that workers offer, including those that could not be loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.html.rendering import Context
from app.http.parameters import Text
from app.submission import config_schema
from app.submission.config_schema import Property
from db.errors import NotFound
from db.queue import workers
from db.tables import Worker

router = Router()

#: Defaults of optional fields of a recipe.
DEFAULTS: dict[str, object] = {"file": "", "package": "", "place": "", "check": None}


@dataclass
class Offered:
    """A recipe that workers offer."""

    recipe: dict[str, Any]  # of the first of its workers
    workers: list[str] = field(default_factory=list)
    alike: bool = True  # whether it has the same settings on all of them

    @property
    def own(self) -> list[Property]:
        """The recipe's own settings."""
        return [prop for prop in self.properties if prop.group == "recipe"]

    @property
    def properties(self) -> list[Property]:
        """All settings, the recipe's own first."""
        properties = config_schema.properties(self.recipe.get("schema", {}))
        return sorted(properties, key=lambda prop: prop.group != "recipe")


@router.get("/recipes", SIGNED_IN)
def list_recipes(context: Context) -> HTMLResponse:
    """Show the recipes of the workers that are up, and those that could not be loaded."""
    up = _list_current_workers(context.session)
    offered = by_name(up)
    return context.render(
        "submission/recipes.html",
        up=up,
        outdated=workers.describe_outdated_workers(context.session),
        broken=[row for row in offered if "error" in row.recipe],
        lacking=[row for row in offered if "needs" in row.recipe],
        offered=[row for row in offered if "schema" in row.recipe],
    )


@router.get("/recipes/{name:path}", SIGNED_IN)
def show_recipe(name: Text, context: Context) -> HTMLResponse:
    """Show a recipe with all of its settings. Raises NotFound."""
    session = context.session
    offered = [row for row in by_name(_list_current_workers(session)) if "schema" in row.recipe]
    recipe = workers.named([row.recipe for row in offered], name)
    if recipe is None:
        raise NotFound(workers.describe_unknown_recipe(session, name))
    row = next(row for row in offered if row.recipe is recipe)
    return context.render("submission/recipe.html", row=row)


def _list_current_workers(session: Session) -> list[Worker]:
    """Return the workers of this version that are up."""
    everyone = workers.all_workers(session)
    return [worker for worker, is_up in everyone if is_up and not workers.is_outdated(worker)]


def by_name(up: Iterable[Worker]) -> list[Offered]:
    """Return each recipe once, in order of title, with the workers on which it has that state."""
    rows: dict[tuple[str, ...], Offered] = {}
    for worker in up:
        for recipe in worker.recipes:
            state = recipe.get("error") or recipe.get("needs") or ""
            offered = rows.setdefault((recipe["name"], state), Offered(DEFAULTS | recipe))
            offered.workers.append(worker.name)
            offered.alike &= recipe.get("schema") == offered.recipe.get("schema")
    return sorted(rows.values(), key=_title)


def _title(row: Offered) -> tuple[str, str]:
    return str(row.recipe.get("title") or row.recipe["name"]).casefold(), row.recipe["name"]
