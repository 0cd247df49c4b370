"""Record of damaged steps and points that a writer has written again without.

The tail of a run is joined and sealed while the run goes on. A damaged part of it is left out, and
then no damaged block shows the loss. Its range is recorded as a diagnosis of the run.
"""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, insert, select

from db.tables import Diagnosis
from db.telemetry import damage
from db.telemetry.damage import Damage

P = ParamSpec("P")
T = TypeVar("T")
#: Beginning of the kind of these diagnoses; the kinds that trainings send have no space.
KIND = "lost "


def record_losses(
    write: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[Connection, P], T]:
    """Let a writer record what it could not read of what it writes again."""

    @wraps(write)
    def write_and_record(connection: Connection, /, *args: P.args, **options: P.kwargs) -> T:
        with damage.collect():
            result = write(connection, *args, **options)
            lost = damage.list_collected()
        for part in lost:
            _record(connection, part)
        damage.note_all(lost)
        return result

    return write_and_record


def read(connection: Connection, run_id: int) -> list[Damage]:
    """Return what was recorded of a run."""
    its = (Diagnosis.run_id == run_id, Diagnosis.kind.startswith(KIND))
    rows = connection.scalars(select(Diagnosis.content).where(*its)).all()
    return [Damage(run_id, **content) for content in rows]


def _record(connection: Connection, lost: Damage) -> None:
    kind = f"{KIND}{lost.kind} {lost.name}".rstrip()
    key = {"run_id": lost.run_id, "kind": kind, "step": lost.first}
    if connection.scalar(select(Diagnosis.id).filter_by(**key)) is None:
        connection.execute(insert(Diagnosis).values(**key, content=lost.fields))
