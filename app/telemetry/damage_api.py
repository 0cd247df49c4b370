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
from db.files import storage
from db.files.object_store import open_store
from db.runs import runs as all_runs
from db.telemetry import damage, damage_search

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
            all_runs.get(session, run_id)
        except NotFound:
            continue
        of_steps = damage_search.find_in_run(session.connection(), run_id)
        found += [DamagedPart(run=run_id, text=part.text, **part.fields) for part in of_steps]
        of_files = storage.find_damaged_files(session, store, run_id)
        for file in of_files:
            fields = {"kind": file.kind, "name": file.key, "first": file.step, "last": file.step}
            found.append(DamagedPart(run=run_id, text=file.text, **fields))
        texts += filter(
            None, [damage.describe(of_steps), storage.describe_damaged_files(run_id, of_files)]
        )
    return DamageOfRuns(damage=found, text=" ".join(texts))
