"""Loss spikes that the training of a run recorded."""

from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, select
from sqlalchemy.orm import Session

from db.tables import Diagnosis
from db.telemetry.telemetry import SPIKE
from halfstep.telemetry.plain_json import JsonObject

#: Latest spikes in the table and chart of a page; the table `diagnoses` has all.
MOST = 200


def spikes(session: Session, run_id: int, *, most: int = MOST) -> list[dict[str, Any]]:
    """Return the latest spikes in order of step: step, loss, z, rolled_back_to."""
    parameters = {"run_id": run_id, "most": most}
    rows = session.connection().execute(_latest_query(), parameters).all()
    return [{"rolled_back_to": None, **content, "step": step} for step, content in reversed(rows)]


@cache
def _latest_query() -> Select[int, JsonObject]:
    query = select(Diagnosis.step, Diagnosis.content)
    query = query.where(Diagnosis.run_id == bindparam("run_id"), Diagnosis.kind == SPIKE)
    return query.order_by(Diagnosis.step.desc()).limit(bindparam("most"))
