"""Where a cluster's own engine starts workers for us: pilots, each for one run alone.

No engine fences, and none may own a supervisor. So it is asked for four things only, and what it
starts is `halfstep worker --only RUN`, which takes its lease as any worker does: that an engine
says a pilot is gone queues no run again.
"""

import hashlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from db.errors import HalfstepError, Invalid
from db.settings import Settings
from worker.clusters.cluster_check import Finding

State: TypeAlias = Literal["waiting", "running", "gone"]

#: By the name of each placement its engine, whose extra has the same name.
ENGINES = {
    "slurm": "worker.clusters.slurm:Slurm",
    "kubernetes": "worker.clusters.kubernetes:Kubernetes",
    "ray": "worker.clusters.ray:Ray",
}


class PlacementRejected(HalfstepError):
    """The cluster answers, and does not start workers for this run."""


@dataclass(frozen=True)
class Pilots:
    """The workers that one attempt needs: one a node, with so many devices each."""

    run_id: int
    attempt: int
    nodes: int
    devices: int

    @property
    def name(self) -> str:
        """By which the engine knows them, so that they are never started twice."""
        return f"halfstep-{self.run_id}-{self.attempt}"

    @property
    def command(self) -> list[str]:
        """Return what is started on each node."""
        return [sys.executable, "-m", "worker.worker", "--only", str(self.run_id)]


@dataclass(frozen=True)
class Look:
    """How the engine says that pilots fare, and why, in its own words."""

    state: State
    reason: str


class Placement(Protocol):
    """An engine: four calls for a run, and a look at the cluster before the first.

    Each may be repeated; what does not answer raises OSError.
    """

    name: str

    def place(self, pilots: Pilots) -> None:
        """Have pilots started, unless they were. Raises Refused."""

    def look(self, pilots: Pilots) -> Look:
        """Say whether they wait, run, or are gone."""

    def cancel(self, pilots: Pilots) -> None:
        """Have them end: they leave a checkpoint if they are given the time."""

    def log(self, pilots: Pilots) -> str:
        """Return the end of what they printed."""

    def check(self) -> Iterator[Finding]:
        """Say what the cluster lacks, and one of its nodes, if that can be asked."""


def open_placement(settings: Settings) -> Placement:
    """Return the engine that HALFSTEP_PLACEMENT names. Raises Invalid."""
    name = settings.placement
    if name not in ENGINES:
        message = f"{name!r} places nothing; allowed: {', '.join(ENGINES)}"
        raise Invalid({"HALFSTEP_PLACEMENT": message})
    try:
        engine: Placement = pkgutil.resolve_name(ENGINES[name])(settings)
    except ModuleNotFoundError as error:
        message = f"{name!r} needs {error.name}: pip install 'halfstep-service[{name}]'"
        raise Invalid({"HALFSTEP_PLACEMENT": message}) from error
    return engine


def installation(settings: Settings) -> str:
    """Return what tells ours from another installation's on the same cluster."""
    return f"halfstep {hashlib.sha256(settings.database_url.encode()).hexdigest()[:16]}"
