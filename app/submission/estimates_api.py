"""Route of cost estimates for a run before its submission."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import LARGEST_STEP, DocumentedModel, Text
from app.submission.submission import LIMITS, PriorityNumber, same_sizes
from db.queue import estimates, workers
from db.queue.estimates import Alike
from halfstep.number_formats import SHORT_DIGITS, count, duration, number, size

router = Router(tags=["runs"])

#: Precisions in which autocast keeps copies of weights.
CASTING = ("fp16", "bf16")

Steps = Annotated[int | None, Query(ge=0, le=LARGEST_STEP)]


class Seconds(BaseModel):
    """Range by the fastest and the slowest similar run."""

    least: float
    most: float


class Measured(BaseModel):
    """Medians of the latest finished runs in one precision, of the same sizes and batch size."""

    runs: int
    steps_per_second: float
    memory_bytes: Annotated[float | None, Field(description="Peak; null if not recorded")]
    speed_text: str
    memory_text: str


class Cost(DocumentedModel):
    """Estimate from the latest finished runs with the same recipe, precision and devices."""

    ahead: Annotated[int, Field(description="Queued runs that start sooner")]
    like_runs: Annotated[list[int], Field(description="Ids of the similar runs, at most five")]
    same_batch_size: bool
    """Whether some have the requested batch size"""
    same_sizes: Annotated[bool, Field(description="Whether they have the requested sizes")]
    seconds: Seconds | None
    """Training time; null without steps or similar runs"""
    checkpoint_bytes: int | None
    """Size of a checkpoint with its weights; null if the sizes differ"""
    memory_bytes: Annotated[
        int | None,
        Field(
            description="Weights, gradients, optimizers' state and half-precision copies, with the "
            "recipe's default sizes, without activations; null until a worker has computed it"
        ),
    ]
    measured: dict[str, Measured]
    """By precision; absent if not measured yet"""
    sentences: Annotated[list[str], Field(description="The estimate as sentences")]


@router.get("/estimates", SIGNED_IN)
def estimate(
    session: Db,
    recipe: Text,
    precision: Text,
    steps: Annotated[Steps, Query(description="Steps of the run")] = None,
    batch_size: Annotated[int | None, Query(ge=1, le=LARGEST_STEP)] = None,
    nodes: Annotated[int, Query(ge=1, le=LIMITS["nodes"][1])] = 1,
    devices_per_node: Annotated[int, Query(ge=1, le=LIMITS["devices_per_node"][1])] = 1,
    priority: PriorityNumber = 0,
    every_steps: Annotated[
        Steps, Query(description="Steps between checkpoints, if all of them are retained")
    ] = None,
    sizes: Annotated[
        list[Text],
        Query(
            alias="size",
            max_length=100,
            description="Settings of the form, such as recipe.width=128: the recipe's integers, "
            "choices and texts, which similar runs have in common",
        ),
    ] = [],  # noqa: B006
) -> Cost:
    """Estimate the duration and the files of a run, from similar runs."""
    offered = workers.recipe(session, recipe)
    requested = dict(text.removeprefix("recipe.").partition("=")[::2] for text in sizes)
    alike: dict[str, Any] = {
        "recipes": {offered["name"], offered.get("reference", offered["name"])},
        "nodes": nodes,
        "devices_per_node": devices_per_node,
        "batch_size": batch_size,
        "has_same_sizes": lambda settings: same_sizes(settings, requested),
    }
    similar = estimates.alike(session, precision=precision, **alike)
    seconds = None
    if similar.runs and steps:
        seconds = Seconds(least=steps / similar.fastest, most=steps / similar.slowest)
    ahead = estimates.ahead(session, priority)
    checkpoint_bytes = (
        estimates.checkpoint_bytes(session, similar.runs) if similar.same_sizes else None
    )
    memory_bytes = _memory_bytes(offered, precision)
    saves = -(-steps // every_steps) if steps and every_steps else 1
    return Cost(
        ahead=ahead,
        like_runs=similar.runs,
        same_batch_size=similar.same_batch_size,
        same_sizes=similar.same_sizes,
        seconds=seconds,
        checkpoint_bytes=checkpoint_bytes,
        memory_bytes=memory_bytes,
        measured={
            name: Measured(
                **vars(row),
                speed_text=f"{number(row.steps_per_second)} steps/s",
                memory_text="" if row.memory_bytes is None else size(row.memory_bytes),
            )
            for name, row in estimates.measure(session, **alike).items()
        },
        sentences=[
            *_time_sentences(ahead, similar, seconds),
            *_file_sentences(checkpoint_bytes, saves),
            *_worker_sentences(session, offered, memory_bytes),
        ],
    )


def _memory_bytes(offered: dict[str, Any], precision: str) -> int | None:
    if (counted := offered.get("memory")) is None:
        return None
    kinds = ["weight_bytes", "gradient_bytes", "optimizer_bytes"]
    return sum(int(counted[kind]) for kind in [*kinds, *(["cast_bytes"] * (precision in CASTING))])


def _worker_sentences(
    session: Session, offered: dict[str, Any], needed: int | None
) -> Iterator[str]:
    """Yield sentences on drained workers, and on the needed memory compared to their devices."""
    able = [worker for worker in workers.alive(session) if workers.offers(worker, offered["name"])]
    if able and all(worker.drained_at for worker in able):
        names = ", ".join(worker.name for worker in able[:3])
        yield f"It must wait: all workers that offer it are drained: {names}"
    if needed is None:
        return
    most = max((workers.device_memory_bytes(worker.devices) for worker in able), default=0.0)
    of = f" of a device's {size(most)}" if most >= needed else ""
    short = f", more than the {size(most)} of any device that is up" if 0 < most < needed else ""
    text = f"Weights, gradients and optimizer state: about {size(needed)}{of}{short}"
    yield f"{text}; at the recipe's default sizes, without activations"


def _time_sentences(ahead: int, similar: Alike, seconds: Seconds | None) -> Iterator[str]:
    if ahead:
        yield f"{count(ahead)} {'run' if ahead == 1 else 'runs'} ahead of it in the queue"
    if seconds is None:
        return
    least, most = duration(seconds.least), duration(seconds.most)
    time = least if least == most else f"{least} to {most}"
    slow, fast = number(similar.slowest, SHORT_DIGITS), number(similar.fastest, SHORT_DIGITS)
    pace = slow if slow == fast else f"{slow}–{fast}"
    runs = (
        f"{len(similar.runs)} similar runs" if len(similar.runs) > 1 else f"run {similar.runs[0]}"
    )
    other = "" if similar.same_batch_size else " of other batch sizes"
    other = other if similar.same_sizes else " of other sizes"
    yield f"About {time} of training ({runs}{other}: {pace} steps/s)"


def _file_sentences(checkpoint_bytes: int | None, saves: int) -> Iterator[str]:
    if checkpoint_bytes is None:
        return
    one = size(checkpoint_bytes)
    if saves > 1:
        yield f"{count(saves)} checkpoints of {one}, {size(saves * checkpoint_bytes)} in total"
    else:
        yield f"A checkpoint of {one}"
