"""Workers: registration, heartbeat, drain, and their combined capabilities."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import exists, func, select, text, update
from sqlalchemy.orm import Session, defer

from db.access import audit
from db.alerts import notifications
from db.clock import now
from db.errors import Conflict, NotFound
from db.paging import Page, page
from db.tables import COMMAND, Run, RunNode, Status, Worker
from halfstep import protocol

#: A worker that has not been seen for so long is shown as gone.
SILENCE_SECONDS = 15.0
#: Recipe that the empty list of runs offers to train, and the usual one of forms.
SAMPLE_RECIPE = "digits"
ALIVE = Worker.stopped_at.is_(None) & (Worker.seen_at > now() - SILENCE_SECONDS)
#: It may be given a run.
TAKING = ALIVE & Worker.drained_at.is_(None)
#: What to do about a worker of another version.
OUTDATED = (
    "Install this version on its machine: pip install --upgrade 'halfstep-service[worker]', "
    "then start the worker again."
)
#: Workers that lists show: a cluster creates one for each attempt, which is hidden once it is gone.
LASTING = Worker.only_run_id.is_(None) | ALIVE


def register(
    session: Session,
    *,
    name: str,
    host: str,
    pid: int,
    devices: list[dict[str, object]],
    recipes: list[dict[str, object]],
    versions: dict[str, Any],
    offers_commands: bool = False,
    is_sandboxed: bool = False,
    sandbox: dict[str, str] | None = None,
    only_run_id: int | None = None,
    placement: str | None = None,
) -> Worker:
    """Register a worker; a known name is the same worker after a restart.

    Raises Conflict if it is alive on another host: two would treat each other's runs as lost.
    """
    worker = session.scalar(select(Worker).where(Worker.name == name))
    if worker is not None and worker.host != host and _is_alive(session, worker):
        raise Conflict(
            f"HALFSTEP_WORKER_NAME: a worker named {name!r} is up on {worker.host}; "
            "choose another name"
        )
    if worker is None:
        worker = Worker(name=name, recipes=[])
        session.add(worker)
    if only_run_id is None:  # a cluster's worker exists for one run, and offers the same recipes
        audit.note_recipes(session, name, _files_of(worker.recipes), _files_of(recipes))
    worker.host, worker.pid = host, pid
    worker.devices, worker.versions = devices, versions | protocol.VERSIONS
    worker.precisions = precisions(devices)
    worker.device_memory_bytes = device_memory_bytes(devices)
    worker.recipes, worker.recipe_names = recipes, recipe_names(recipes)
    worker.offers_commands, worker.is_sandboxed = offers_commands, is_sandboxed
    worker.sandbox = sandbox or {}
    worker.only_run_id, worker.placement = only_run_id, placement
    worker.started_at = worker.seen_at = now()
    worker.stopped_at = None
    session.flush()
    return worker


def offer(session: Session, worker_id: int, recipes: list[dict[str, object]]) -> None:
    """Update the recipes that a worker offers."""
    worker = session.get_one(Worker, worker_id, with_for_update=True)
    audit.note_recipes(session, worker.name, _files_of(worker.recipes), _files_of(recipes))
    worker.recipes, worker.recipe_names = recipes, recipe_names(recipes)


def is_outdated(worker: Worker) -> bool:
    """Return whether a worker has another version than this process."""
    return not protocol.is_current(worker.versions)


def _files_of(recipes: list[dict[str, Any]]) -> set[str]:
    """Return the references of registered recipe files, broken ones included."""
    references = (recipe.get("reference", recipe["name"]) for recipe in recipes)
    return {reference for reference in references if reference.startswith("/")}


def recipe_names(recipes: list[dict[str, Any]]) -> list[str]:
    """Return the names by which runs request these recipes.

    A file is requested by its declared name; runs of an earlier version have its path.
    """
    able = [recipe for recipe in recipes if "schema" in recipe]
    names = [recipe["name"] for recipe in able]
    return list(
        dict.fromkeys([*names, *(recipe.get("reference", recipe["name"]) for recipe in able)])
    )


def reference(worker: Worker, name: str) -> str:
    """Return the reference that a worker loads for this recipe: for a file, its path."""
    for recipe in worker.recipes:
        if recipe["name"] == name:
            return str(recipe.get("reference", name))
    return name


def _is_alive(session: Session, worker: Worker) -> bool:
    return session.scalar(select(Worker.id).where(Worker.id == worker.id, ALIVE)) is not None


@dataclass(frozen=True)
class PendingWork:
    """The work for a worker, read in one query."""

    is_stopped: bool  # it must stop its runs
    nodes: int  # its active nodes
    is_queued: bool  # there are queued runs
    is_lost: bool  # there are expired leases
    revision: str  # of the tables


def heartbeat(
    session: Session, worker_id: int, warm_memory_bytes: int | None = None
) -> PendingWork:
    """Send a worker's heartbeat, and return its work, in one statement.

    warm_memory_bytes: memory of its warm process; None without one.
    """
    values = {"seen_at": now(), "warm_memory_bytes": warm_memory_bytes}
    alive = update(Worker).where(Worker.id == worker_id).values(values)
    alive = alive.execution_options(synchronize_session=False)
    return PendingWork(*session.execute(alive.returning(*_pending_work(worker_id))).one())


def pending_work(session: Session, worker_id: int) -> PendingWork:
    """Return the work for a worker."""
    query = select(*_pending_work(worker_id)).where(Worker.id == worker_id)
    return PendingWork(*session.execute(query).one())


def _pending_work(worker_id: int) -> tuple[Any, ...]:
    mine = select(func.count()).where(RunNode.worker_id == worker_id, RunNode.ended_at.is_(None))
    return (
        Worker.drained_at.is_not(None) & Worker.drain_stops,
        mine.scalar_subquery(),
        exists().where(Run.status == Status.QUEUED),
        exists().where(RunNode.ended_at.is_(None), RunNode.lease_expires_at < now()),
        text("(SELECT version_num FROM alembic_version)"),
    )


def drain(session: Session, worker_id: int, *, stop: bool = False) -> Worker:
    """Drain a worker: it stops claiming runs. stop: also stop its runs. Raises NotFound."""
    worker = _lock(session, worker_id)
    worker.drained_at, worker.drain_stops = worker.drained_at or now(), stop
    notifications.notify(session, worker_id)
    session.flush()
    return worker


def undrain(session: Session, worker_id: int) -> Worker:
    """Let a worker claim runs again. Raises NotFound."""
    worker = _lock(session, worker_id)
    worker.drained_at, worker.drain_stops = None, False
    notifications.notify(session, worker_id)
    session.flush()
    return worker


def _lock(session: Session, worker_id: int) -> Worker:
    worker = session.get(Worker, worker_id, with_for_update=True)
    if worker is None:
        raise NotFound(f"There is no worker {worker_id}.")
    return worker


def stop(session: Session, worker_id: int) -> None:
    """Record that a worker stopped on purpose."""
    stopped = update(Worker).where(Worker.id == worker_id)
    session.execute(stopped.values(stopped_at=now(), warm_memory_bytes=None))


def get(session: Session, worker_id: int | None) -> Worker:
    """Return a worker that must exist."""
    return session.get_one(Worker, worker_id)


def of_nodes(session: Session, run: Run) -> list[str]:
    """Return the worker of each node of a run's latest attempt; none while it is queued again."""
    if run.status == Status.QUEUED:
        return []
    of_attempt = (RunNode.run_id == run.id) & (RunNode.attempt == run.attempt)
    query = select(Worker.name).join(RunNode, RunNode.worker_id == Worker.id).where(of_attempt)
    return list(session.scalars(query.order_by(RunNode.node)))


def with_liveness(session: Session, worker_id: int) -> tuple[Worker, bool]:
    """Return a worker, and whether it is alive. Raises NotFound."""
    row = session.execute(select(Worker, ALIVE).where(Worker.id == worker_id)).one_or_none()
    if row is None:
        raise NotFound(f"There is no worker {worker_id}.")
    return row[0], bool(row[1])


def all_workers(session: Session) -> list[tuple[Worker, bool]]:
    """Return workers with their liveness; of workers for one run only those alive."""
    rows = session.execute(select(Worker, ALIVE).where(LASTING).order_by(Worker.name))
    return [(worker, bool(is_alive)) for worker, is_alive in rows]


def page_of_all(session: Session, *, after: str = "", limit: int) -> Page:
    """Return a page of workers by time of registration, each with its liveness."""
    query = select(Worker, ALIVE).where(LASTING)
    return page(session, query, (Worker.id,), after=after, limit=limit)


def recipe_file(worker: Worker, name: str) -> Path | None:
    """Return the path of a recipe's source on its machine, if known."""
    file = (named(worker.recipes, name) or {}).get("source")
    return Path(file) if file else None


def alive(session: Session) -> list[Worker]:
    """Return the workers that are alive, without the long schemas of their recipes."""
    query = select(Worker).options(defer(Worker.recipes, raiseload=True)).where(ALIVE)
    return list(session.scalars(query.order_by(Worker.name)))


def precisions(devices: list[dict[str, object]]) -> list[str]:
    """Return the precisions that all of a worker's devices support."""
    names = ("fp16", "bf16", "fp8")  # a worker of an earlier version does not report fp8
    return ["fp32", *(n for n in names if all(device.get(n, False) for device in devices))]


def device_memory_bytes(devices: list[dict[str, Any]]) -> float:
    """Return the smallest memory of a worker's devices."""
    return min((float(device["memory_bytes"]) for device in devices), default=0.0)


def recipes(session: Session) -> list[dict[str, object]]:
    """Return the recipes that can be submitted, each once; alive workers take precedence.

    Not those of an outdated worker, whose schema may not be that of the version that trains.
    """
    offers = sorted(all_workers(session), key=lambda row: (not row[1], -row[0].seen_at))
    by_name: dict[str, dict[str, object]] = {}
    for worker, _alive in offers:
        for recipe in [] if is_outdated(worker) else worker.recipes:
            if "schema" in recipe:
                by_name.setdefault(recipe["name"], recipe)
    return sorted(by_name.values(), key=lambda recipe: str(recipe["name"]))


def usual_recipe(offered: list[dict[str, object]]) -> dict[str, Any] | None:
    """Return the recipe of a form that names none: the sample, or else the first."""
    return named(offered, SAMPLE_RECIPE) or next(iter(offered), None)


def recipe(session: Session, name: str) -> dict[str, Any]:
    """Return a recipe by name or file path. Raises NotFound, with the known names."""
    if match := find_recipe(session, name):
        return match
    raise NotFound(describe_unknown_recipe(session, name))


def describe_unknown_recipe(session: Session, name: str) -> str:
    """Return a sentence on a name that no recipe has, with the known ones."""
    hint = describe_outdated_workers(session)
    none = "none: no worker of this version is up" if hint else "none: no worker is up"
    known = ", ".join(str(row["name"]) for row in recipes(session)) or none
    return f"There is no recipe {name!r}. Workers offer: {known}. {hint}".rstrip()


def describe_outdated_workers(session: Session) -> str:
    """Return which workers that are up are outdated, and what helps; empty if none is."""
    return describe_outdated([worker for worker in alive(session) if is_outdated(worker)])


def describe_outdated(outdated: Sequence[Worker]) -> str:
    """Return the versions of outdated workers, and what helps; empty without any."""
    if not outdated:
        return ""
    found = ", ".join(
        f"{worker.name} has {_describe_version(worker.versions)}" for worker in outdated
    )
    own = _describe_version(protocol.VERSIONS)
    text = f"Worker {found}; this server has {own}. Recipes of another version are not offered."
    return f"{text} {OUTDATED}"


def _describe_version(versions: Mapping[str, object]) -> str:
    """Return a version and its protocol number, which 0.1.0 does not register."""
    if "halfstep" not in versions:
        return "an earlier version"
    return f"version {versions['halfstep']} (protocol {versions.get('protocol', 'none')})"


def find_recipe(session: Session, name: str) -> dict[str, Any] | None:
    """Return a recipe by name or file path, or None."""
    # Schemas are long, so they are read of one worker only: each update of a run needs a recipe.
    for worker_id, names, versions in session.execute(_holders_query()).all():
        if name in names and protocol.is_current(versions):
            offered = session.scalars(select(Worker.recipes).where(Worker.id == worker_id)).one()
            if match := named([recipe for recipe in offered if "schema" in recipe], name):
                return match
    return None


@cache
def _holders_query() -> Any:
    newest = (ALIVE.desc(), Worker.seen_at.desc())
    return select(Worker.id, Worker.recipe_names, Worker.versions).order_by(*newest)


def named(offered: list[dict[str, object]], name: str) -> dict[str, Any] | None:
    """Return the recipe of this name, or of this path as in runs of an earlier version."""
    matches = [recipe for recipe in offered if recipe["name"] == name]
    matches += [recipe for recipe in offered if recipe.get("reference") == name]
    return matches[0] if matches else None


def precisions_for(session: Session, recipe: str) -> set[str]:
    """Return the precisions of the alive workers that offer a recipe."""
    return {
        precision
        for worker in alive(session)
        if offers(worker, recipe)
        for precision in precisions(worker.devices)
    }


def has_tf32(session: Session, recipe: str) -> bool:
    """Return whether all alive workers that offer a recipe have TF32."""
    able = [worker for worker in alive(session) if offers(worker, recipe)]
    return bool(able) and all(
        device.get("tf32", False) for worker in able for device in worker.devices
    )


def offers(worker: Worker, recipe: str) -> bool:
    """Return whether a worker can run a recipe."""
    return recipe in worker.recipe_names


def takes(worker: Worker, source: str, recipe: str, precision: str) -> bool:
    """Return whether a worker runs this kind of run: recipe or command."""
    if source == COMMAND:
        return worker.offers_commands
    return offers(worker, recipe) and precision in precisions(worker.devices)


def most_together(some: Iterable[Worker]) -> int:
    """Return how many of these workers can train one run together: those of one torch version."""
    return max(Counter(worker.versions.get("torch") for worker in some).values(), default=0)


def offer_commands(session: Session) -> bool:
    """Return whether an alive worker runs commands."""
    query = select(Worker.id).where(ALIVE, Worker.offers_commands).limit(1)
    return session.scalar(query) is not None
