"""Recorded steps and points that cannot be read, and who reads around them.

Readers leave a damaged block out and note it; a request collects what its readers have noted, so
that its response can name it. db.telemetry.damage_search finds all damage, whatever is read.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

from halfstep.number_formats import count

logger = logging.getLogger(__name__)

#: Ranges and metrics that a sentence names.
MOST_NAMED = 3
#: Kinds of damage: blocks of steps, steps of a lost file, blocks of a metric, a flush of metrics.
KINDS = STEPS, LOST, METRIC, FLUSH = "steps", "lost", "metric", "flush"


class Damage(NamedTuple):
    """Steps or points of a run that cannot be read."""

    run_id: int
    kind: str
    first: int = 0  # step; of FLUSH the number of the flush, if it is known
    last: int = 0
    name: str = ""  # of the metric

    @property
    def text(self) -> str:
        """What is left out, without the run."""
        span = f"{count(self.first)} to {count(self.last)}"
        return {
            STEPS: f"steps {span}",
            METRIC: f"{self.name} at steps {span}",
            FLUSH: "a flush of logged metrics",
            LOST: f"all but the summaries of steps {span}",
        }[self.kind]

    def __str__(self) -> str:
        return f"run {self.run_id}: {self.text}"

    @property
    def fields(self) -> dict[str, str | int]:
        """Its fields without the run."""
        return {"kind": self.kind, "name": self.name, "first": self.first, "last": self.last}


_noted: ContextVar[dict[Damage | str, None] | None] = ContextVar("_noted", default=None)

#: Runs that requests or writers have met damaged since `take_suspects`.
_suspects: set[int] = set()


@contextmanager
def collect() -> Iterator[None]:
    """Collect the damage that readers note."""
    token = _noted.set({})
    try:
        yield
    finally:
        _noted.reset(token)


def describe_collected() -> str:
    """Return in words what readers have noted since `collect`; empty without damage."""
    texts = [part for part in _noted.get() or {} if isinstance(part, str)]
    read = describe(list_collected())
    return " ".join(filter(None, [*texts, "" if any(read in text for text in texts) else read]))


def list_collected() -> list[Damage]:
    """Return the steps and points that readers have noted since `collect`."""
    return sort(part for part in _noted.get() or {} if isinstance(part, Damage))


def sort(some: Iterable[Damage]) -> list[Damage]:
    """Return damage by run, kind and step."""
    return sorted(some, key=lambda part: (part.run_id, KINDS.index(part.kind), part))


def note(damage: Damage, problem: object) -> None:
    """Log damage once, and add it to what the request collects."""
    _log(damage, str(problem))
    noted = _noted.get()
    if noted is not None:
        noted[damage] = None
        suspect(damage.run_id)


def suspect(run_id: int) -> None:
    """Let the run be checked: its mark may be wrong."""
    _suspects.add(run_id)


def take_suspects() -> list[int]:
    """Return the runs to check, each once."""
    taken = list(_suspects)
    _suspects.difference_update(taken)
    return taken


@lru_cache(10_000)
def _log(damage: Damage, problem: str) -> None:
    logger.warning("%s of run %d cannot be read: %s", damage.text, damage.run_id, problem)


def note_all(some: Collection[Damage | str]) -> None:
    """Add known damage, or sentences on it, to what the request collects."""
    noted = _noted.get()
    if noted is not None:
        noted.update(dict.fromkeys(filter(None, some)))


def describe(some: Collection[Damage]) -> str:
    """Return what is lost, in words; empty if nothing is."""
    texts = []
    for run_id in sorted({part.run_id for part in some}):
        mine = list(dict.fromkeys(part.text for part in some if part.run_id == run_id))
        more = f" and {len(mine) - MOST_NAMED} more ranges" if len(mine) > MOST_NAMED else ""
        named = ", ".join(mine[:MOST_NAMED])
        texts.append(f"Run {run_id} is damaged: {named}{more} cannot be read.")
    return " ".join([*texts, "A backup may have them."]) if texts else ""
