"""Whether a worker that is up could take a queued run: the condition of lists."""

from typing import Any

from sqlalchemy import Boolean, ColumnElement, and_, case, exists, func, or_, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from db.queue.quotas import GIB
from db.queue.reservations import MEMORY_GIB
from db.queue.workers import ALIVE
from db.tables import COMMAND, RECIPE, Run, Status, Worker


class has_text(FunctionElement[bool]):  # noqa: N801 - reads as the SQL function that it is
    """Whether a JSON array of texts, the first argument, contains the second one."""

    type = Boolean()
    inherit_cache = True


@compiles(has_text)
def _compile_has_text(element: has_text, compiler: SQLCompiler, **options: Any) -> str:
    array, text = (compiler.process(clause, **options) for clause in element.clauses)
    values = "json_each" if compiler.dialect.name == "sqlite" else "json_array_elements_text"
    return f"EXISTS (SELECT 1 FROM {values}({array}) AS value WHERE value = {text})"  # noqa: S608


def is_infeasible() -> ColumnElement[bool]:
    """Return the condition that no worker that is up could take a queued run."""
    offers_recipe = and_(
        Run.source == RECIPE,
        has_text(Worker.recipe_names, Run.recipe),
        has_text(Worker.precisions, Run.precision),
        Worker.device_memory_bytes >= MEMORY_GIB * GIB,
    )
    is_large = func.json_array_length(Worker.devices) >= Run.devices_per_node
    takes = and_(
        ALIVE,
        or_(offers_recipe, and_(Run.source == COMMAND, Worker.offers_commands)),
        or_(is_large, Worker.placement.is_not(None)),  # a cluster reports its own capacity
    )
    nodes = func.sum(case((Worker.placement.is_(None), 1), else_=Run.nodes))
    together = select(nodes).where(takes).correlate(Run).scalar_subquery()
    return and_(
        Run.status == Status.QUEUED,
        Run.source.in_((RECIPE, COMMAND)),
        exists().where(ALIVE),
        or_(
            ~exists().where(takes).correlate(Run),
            and_(Run.nodes > 1, together < Run.nodes),
        ),
    )
