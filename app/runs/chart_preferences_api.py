"""Routes of the user's own arrangement of charts: panels by recipe, and the toolbar."""

from typing import Annotated, Literal

from fastapi import Query
from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.audit import unaudited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import Body, Name
from db.access import chart_preferences
from db.access.chart_preferences import PANELS, TOOLBAR
from db.tables import User
from halfstep.number_formats import number

router = Router(prefix="/preferences", tags=["account"])

#: Limit of panels that an arrangement names.
MOST_PANELS = 200
#: What panels of several runs are arranged as, instead of a recipe, also in chart_preferences.js.
SEVERAL_RUNS = "several runs"
#: Panels that the server draws.
FIRST_PANELS = ("loss", "scale", "norm")


def _check_order(limits: tuple[float, float]) -> tuple[float, float]:
    if not limits[0] < limits[1]:
        raise ValueError(
            f"{number(limits[0])} to {number(limits[1])}; allowed: from lower to higher"
        )
    return limits


Names = Annotated[list[Name], Field(default_factory=list, max_length=MOST_PANELS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Limits = Annotated[tuple[Number, Number], AfterValidator(_check_order)]


class PanelSize(Body):
    """The size of a panel."""

    width: Literal["", "half", "full"] = ""
    height: Annotated[int, Field(ge=120, le=800, description="Height of the plot in pixels")]


class PanelArrangement(Body):
    """The panels of a recipe's runs, as a user arranged them."""

    pinned: Names
    collapsed: Annotated[Names, Field(description="Collapsed groups")]
    order: Names
    sizes: Annotated[dict[Name, PanelSize], Field(default_factory=dict, max_length=MOST_PANELS)]
    ranges: Annotated[dict[Name, Limits], Field(default_factory=dict, max_length=MOST_PANELS)]
    """Fixed y ranges; exponents on a log axis"""
    logs: Annotated[Names, Field(description="Panels with a log axis by choice")]
    trimmed: Annotated[Names, Field(description="Panels whose y range ignores outliers")]


class NewPanelArrangement(PanelArrangement):
    """An arrangement to store."""

    recipe: Annotated[Name, Field(description="Empty: of runs without a recipe")] = ""


class Toolbar(Body):
    """The choices above the charts, of all runs."""

    x: Annotated[Name, Field(description="step, applied, time, examples, metric:NAME")] = "step"
    loss: Literal["linear", "log"] = "linear"
    """Of an earlier version: the axis of panels not arranged since"""
    smooth: Annotated[float, Field(ge=0, le=0.99)] = 0


class Preferences(BaseModel):
    """How the user has arranged charts; null: not yet."""

    panels: PanelArrangement | None
    toolbar: Toolbar | None

    @property
    def has_usual_charts(self) -> bool:
        """Whether the first charts of a run are drawn in the usual way."""
        toolbar, panels = self.toolbar, self.panels
        if toolbar is not None and toolbar != Toolbar(loss=toolbar.loss):
            return False
        changed = {*panels.logs, *panels.trimmed} if panels else set()
        return changed.isdisjoint(FIRST_PANELS)


@router.get("", ACCOUNT)
def read_preferences(
    session: Db, principal: SignedIn, recipe: Annotated[Name, Query()] = ""
) -> Preferences:
    """Return the arrangement of a recipe's panels, and the toolbar."""
    return preferences(session, principal.user, recipe)


@router.put("/panels", ACCOUNT, status_code=204)
@unaudited("The user's own arrangement of charts.")
def write_panels(body: NewPanelArrangement, session: Db, principal: SignedIn) -> None:
    """Store the arrangement of a recipe's panels."""
    content = body.model_dump(mode="json", exclude={"recipe"})
    chart_preferences.write(session, principal.user, f"{PANELS}{body.recipe}", content)


@router.put("/toolbar", ACCOUNT, status_code=204)
@unaudited("The user's own arrangement of charts.")
def write_toolbar(body: Toolbar, session: Db, principal: SignedIn) -> None:
    """Store the choices above the charts."""
    chart_preferences.write(session, principal.user, TOOLBAR, body.model_dump(mode="json"))


def preferences(session: Session, user: User, recipe: str = "") -> Preferences:
    """Return what a user has arranged.

    Earlier versions kept the log axis of the loss for all runs, in the toolbar. It holds for panels
    that were not arranged since: these have no `trimmed`.
    """
    panels = chart_preferences.read(session, user, f"{PANELS}{recipe}")
    bar = toolbar(session, user)
    if bar and bar.loss == "log" and "trimmed" not in (panels or {}):
        known = panels or {}
        panels = known | {"logs": list(dict.fromkeys([*known.get("logs", []), "loss"]))}
    return Preferences.model_validate({"panels": panels, "toolbar": bar})


def toolbar(session: Session, user: User) -> Toolbar | None:
    """Return the choices above the charts that a user made last."""
    content = chart_preferences.read(session, user, TOOLBAR)
    return None if content is None else Toolbar.model_validate(content)
