"""Groups of compared runs: one configuration in several precisions, or a run and forks."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.errors import Invalid, NotFound
from db.queue.workers import ALIVE
from db.runs.runs import check_not_deleted
from db.tables import NOT_DELETED, RECIPE, LatestMetric, Run, RunNode, Status, User, Worker
from halfstep.telemetry.plain_json import JsonObject

TF32, FP8 = "TF32", "fp8"
MOST_COMPARED = 20
#: Configuration fields that each variant of a comparison sets, by path.
VARIANTS: dict[str, dict[str, object]] = {
    "fp32": {"precision": "fp32", "scaler.enabled": True, "training.tf32": False},
    TF32: {"precision": "fp32", "scaler.enabled": True, "training.tf32": True},
    "fp16 without scaler": {"precision": "fp16", "scaler.enabled": False},
    "fp16": {"precision": "fp16", "scaler.enabled": True},
    "bf16": {"precision": "bf16", "scaler.enabled": True},
    FP8: {"precision": FP8, "scaler.enabled": True},
}


def variant(config: JsonObject) -> str:
    """Return the name of the variant that a configuration belongs to."""
    precision = str(config["precision"])
    if precision == "fp16" and not config.get("scaler", {}).get("enabled", True):
        return "fp16 without scaler"
    if precision == "fp32" and config.get("training", {}).get("tf32", False):
        return TF32
    return precision


def members(session: Session, group_id: int) -> list[tuple[Run, str]]:
    """List a group's runs with their owners' names, in order of id. Raises NotFound."""
    query = select(Run, User.name).join(User, User.id == Run.owner_id)
    query = query.where(Run.group_id == group_id, NOT_DELETED).order_by(Run.id)
    rows = [(run, owner) for run, owner in session.execute(query)]
    if not rows:
        raise NotFound(f"There is no group {group_id}.")
    return rows


def join(session: Session, run: Run, other_id: int) -> None:
    """Add a run to the comparison group of another run.

    Raises Invalid if the other run does not exist or has another recipe, or if its group is full.
    """
    row = session.get(Run, other_id, with_for_update=True)
    other = check_not_deleted(row, "compared_with", other_id)
    if other.recipe != run.recipe or other.source != RECIPE:
        of = other.recipe or "no recipe"
        text = f"run {other_id} is of {of}; allowed: a run of {run.recipe}"
        raise Invalid({"compared_with": text})
    if other.group_id is None:
        other.group_id = other.id
        other.revision += 1
    beside = select(func.count(Run.id)).where(Run.group_id == other.group_id, NOT_DELETED)
    if (session.scalar(beside) or 0) >= MOST_COMPARED:
        text = f"the group of run {other_id} already has {MOST_COMPARED} runs, the maximum"
        raise Invalid({"compared_with": text})
    run.group_id = other.group_id


def labels(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Name configurations in a comparison by their variants.

    If they differ in which modules have their own precision, the names include these modules.
    """
    special = [_special(config) for config in configs]
    differ = len(set(special)) > 1
    return [
        ", ".join(filter(None, (variant(config), special_modules if differ else "")))
        for config, special_modules in zip(configs, special, strict=True)
    ]


def full_name(config: JsonObject) -> str:
    """Name a configuration by its variant, with the modules that have a precision of their own."""
    return ", ".join(filter(None, (variant(config), _special(config))))


def _special(config: JsonObject) -> str:
    return ", ".join(
        f"{' and '.join(config['modules'][precision])} in {precision}"
        for precision in ("fp32", "bf16")
        if config.get("modules", {}).get(precision)
    )


def is_on_cpu(session: Session, group_id: int) -> bool:
    """Return whether a run of the group trains on a CPU.

    Before any has a worker: whether all live workers have only CPUs.
    """
    owners = select(Worker).join(Run, Run.worker_id == Worker.id).where(Run.group_id == group_id)
    if alive := session.scalars(owners).all():
        return any(_has_no_gpu(worker) for worker in alive)
    up = session.scalars(select(Worker).where(ALIVE)).all()
    return bool(up) and all(_has_no_gpu(worker) for worker in up)


def _has_no_gpu(worker: Worker) -> bool:
    return all(device["kind"] == "cpu" for device in worker.devices)


def devices(session: Session, run_ids: Collection[int]) -> dict[int, str]:
    """Name the workers' devices that each run has trained on, over all its attempts."""
    query = select(RunNode.run_id, RunNode.devices, Worker.devices)
    query = query.join(Worker, Worker.id == RunNode.worker_id)
    query = query.where(RunNode.run_id.in_(run_ids), RunNode.resumed_step.is_not(None))
    texts_by_run: dict[int, list[str]] = {}
    for run_id, indexes, offered in session.execute(query.order_by(RunNode.attempt)):
        names = {device["index"]: str(device.get("name") or device["kind"]) for device in offered}
        used = Counter(names.get(index, "a removed device") for index in indexes)
        text = ", ".join(name if n == 1 else f"{n} × {name}" for name, n in used.items())
        texts_by_run.setdefault(run_id, []).append(text)
    return {run_id: "; ".join(dict.fromkeys(texts)) for run_id, texts in texts_by_run.items()}


def seconds(session: Session, group_id: int) -> dict[str, float]:
    """Return the duration of the finished runs of a group in seconds, by variant."""
    query = select(Run.config, LatestMetric.value)
    query = query.join(LatestMetric, LatestMetric.run_id == Run.id)
    query = query.where(Run.group_id == group_id, Run.status == Status.FINISHED, NOT_DELETED)
    rows = session.execute(query.where(LatestMetric.name == "run/seconds").order_by(Run.id))
    seconds_by_variant: dict[str, float] = {}
    for config, value in rows:
        if value is not None:  # the first run of a variant: the group may contain a fork of it
            seconds_by_variant.setdefault(variant(config), value)
    return seconds_by_variant
