"""What a run is likely to cost, before it is submitted."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db
from app.html.formats import count, duration, memory, number, size
from app.http.parameters import LARGEST_STEP, Text
from app.submission.submission import LIMITS, PriorityNumber, same_sizes
from db.queue import estimates, workers
from db.queue.estimates import Alike

router = APIRouter(tags=["runs"])

#: Precisions in which autocast keeps copies of weights.
CASTING = ("fp16", "bf16")

Steps = Annotated[int | None, Query(ge=0, le=LARGEST_STEP)]


class Seconds(BaseModel):
    """By the fastest and by the slowest of the like runs."""

    least: float
    most: float


class Cost(BaseModel):
    """What latest finished runs of the same recipe, precision and number of devices tell."""

    ahead: Annotated[int, Field(description="Queued runs that start sooner")]
    like_runs: Annotated[list[int], Field(description="By which it is judged; five at most")]
    same_batch_size: Annotated[bool, Field(description="Whether theirs is the one asked for")]
    same_sizes: Annotated[bool, Field(description="Whether theirs are those asked for")]
    seconds: Annotated[
        Seconds | None, Field(description="Of its steps; null without steps or like runs")
    ]
    checkpoint_bytes: Annotated[
        int | None, Field(description="Of one, with its weights; null of runs of other sizes")
    ]
    memory_bytes: Annotated[
        int | None,
        Field(
            description="Of weights, gradients, optimizers' state and copies in half precision, "
            "with the recipe's own sizes; null until a worker has counted. Activations not counted"
        ),
    ]
    told: Annotated[list[str], Field(description="All this in words; nothing without evidence")]


@router.get("/estimates")
@requires(SIGNED_IN)
def estimate(
    session: Db,
    _principal: SignedIn,
    recipe: Text,
    precision: Text,
    steps: Annotated[Steps, Query(description="That it shall make")] = None,
    batch_size: Annotated[int | None, Query(ge=1, le=LARGEST_STEP)] = None,
    nodes: Annotated[int, Query(ge=1, le=LIMITS["nodes"][1])] = 1,
    devices_per_node: Annotated[int, Query(ge=1, le=LIMITS["devices_per_node"][1])] = 1,
    priority: PriorityNumber = 0,
    every_steps: Annotated[
        Steps, Query(description="Between checkpoints, all of them kept")
    ] = None,
    sizes: Annotated[
        list[Text],
        Query(
            alias="size",
            max_length=100,
            description="Settings as the form has them, recipe.width=128: of the recipe's whole "
            "numbers, choices and texts, by which runs are like it",
        ),
    ] = [],  # noqa: B006
) -> Cost:
    """Say how long a run may take and what it may leave, from runs like it."""
    offered = workers.recipe(session, recipe)
    asked = dict(each.removeprefix("recipe.").partition("=")[::2] for each in sizes)
    found = estimates.alike(
        session,
        recipes={offered["name"], offered.get("reference", offered["name"])},
        precision=precision,
        nodes=nodes,
        devices_per_node=devices_per_node,
        batch_size=batch_size,
        has_same_sizes=lambda settings: same_sizes(settings, asked),
    )
    seconds = None
    if found.runs and steps:
        seconds = Seconds(least=steps / found.fastest, most=steps / found.slowest)
    ahead = estimates.ahead(session, priority)
    checkpoint_bytes = estimates.checkpoint_bytes(session, found.runs) if found.same_sizes else None
    memory_bytes = _memory_bytes(offered, precision)
    saves = -(-steps // every_steps) if steps and every_steps else 1
    return Cost(
        ahead=ahead,
        like_runs=found.runs,
        same_batch_size=found.same_batch_size,
        same_sizes=found.same_sizes,
        seconds=seconds,
        checkpoint_bytes=checkpoint_bytes,
        memory_bytes=memory_bytes,
        told=[
            *_time_told(ahead, found, seconds),
            *_files_told(checkpoint_bytes, saves),
            *_workers_told(session, offered, memory_bytes),
        ],
    )


def _memory_bytes(offered: dict[str, Any], precision: str) -> int | None:
    if (counted := offered.get("memory")) is None:
        return None
    kinds = ["weight_bytes", "gradient_bytes", "optimizer_bytes"]
    return sum(int(counted[kind]) for kind in [*kinds, *(["cast_bytes"] * (precision in CASTING))])


def _workers_told(session: Session, offered: dict[str, Any], needed: int | None) -> Iterator[str]:
    """Say what keeps workers that are up and offer the recipe from taking it, if anything, and what
    it needs beside the memory of their largest device.
    """
    able = [each for each in workers.alive(session) if workers.offers(each, offered["name"])]
    if able and all(each.drained_at for each in able):
        names = ", ".join(each.name for each in able[:3])
        yield f"it waits, for workers that offer it are drained: {names}"
    if needed is None:
        return
    most = max((workers.device_memory_bytes(each.devices) for each in able), default=0.0)
    of = f" of a device's {memory(most)}" if most >= needed else ""
    short = f", more than the {memory(most)} of any device that is up" if 0 < most < needed else ""
    text = f"{memory(needed)}{of} for weights, gradients and optimizers at the recipe's own sizes"
    yield f"{text}{short}; activations are not counted"


def _time_told(ahead: int, found: Alike, seconds: Seconds | None) -> Iterator[str]:
    if ahead:
        yield f"{count(ahead)} {'run' if ahead == 1 else 'runs'} ahead of it"
    if seconds is None:
        return
    least, most = duration(seconds.least), duration(seconds.most)
    time = least if least == most else f"{least} to {most}"
    slow, fast = number(found.slowest), number(found.fastest)
    pace = slow if slow == fast else f"{slow} to {fast}"
    runs = f"{len(found.runs)} like runs" if len(found.runs) > 1 else f"run {found.runs[0]}"
    other = "" if found.same_batch_size else ", of other batch sizes"
    other = other if found.same_sizes else ", of other sizes"
    yield f"{time} of steps, at the {pace} steps/s of {runs}{other}"


def _files_told(checkpoint_bytes: int | None, saves: int) -> Iterator[str]:
    if checkpoint_bytes is None:
        return
    each = size(checkpoint_bytes)
    if saves > 1:
        yield f"{count(saves)} checkpoints of {each}, {size(saves * checkpoint_bytes)}"
    else:
        yield f"a checkpoint of {each}"
