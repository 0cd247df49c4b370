"""Route of what is damaged or missing of runs."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.compare.comparison import MOST_RUNS
from app.compare.comparison_api import Runs
from app.dependencies import Db, TheSettings
from app.http.parameters import DocumentedModel, as_run_ids
from db.errors import NotFound
from db.files import run_damage
from db.files.object_store import open_store
from db.runs import runs as all_runs
from db.telemetry import damage

router = Router(tags=["series"])


class DamagedPart(DocumentedModel):
    """Steps, points of a metric, or a file of a run that cannot be read."""

    run: int
    kind: Literal["steps", "lost", "metric", "flush", "checkpoint", "artifact"]
    """lost: only summaries are left; flush: metrics of unknown steps"""
    name: Annotated[str, Field(description="Metric or file; empty: steps")]
    first: Annotated[int, Field(description="First step, or the step of a checkpoint")]
    last: int
    text: str


class DamageOfRuns(BaseModel):
    """All damage of some runs."""

    damage: list[DamagedPart]
    text: Annotated[str, Field(description="All of it in words; empty if the runs are whole")]


@router.get("/damage", SIGNED_IN)
def get_damage(runs: Runs, session: Db, settings: TheSettings) -> DamageOfRuns:
    """Return what is damaged of runs: reads all their steps and metrics, and looks for files."""
    found, texts, store = list[DamagedPart](), list[str](), open_store(settings)
    for run_id in as_run_ids("runs", runs, most=MOST_RUNS):
        try:
            run = all_runs.get(session, run_id)
        except NotFound:
            continue
        lost = run_damage.find(session, store, run_id)
        found += [DamagedPart(run=run_id, text=part.text, **part.fields) for part in lost.steps]
        for file in lost.files:
            fields = {"kind": file.kind, "name": file.key, "first": file.step, "last": file.step}
            found.append(DamagedPart(run=run_id, text=file.text, **fields))
        texts += filter(None, [lost.text])
        if lost.mark != run.damage:
            damage.suspect(run_id)
    return DamageOfRuns(damage=found, text=" ".join(texts))
