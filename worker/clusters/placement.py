"""Placement: a cluster's engine starts workers ("pilots"), each for only one run.

No engine fences attempts, and none may own a supervisor. So an engine is used for only four calls,
and starts `halfstep worker --only RUN`, which takes a lease like any worker: an engine's report
that a pilot is gone does not requeue a run.
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

#: Engine by placement name; the package extra has the same name.
ENGINES = {
    "slurm": "worker.clusters.slurm:Slurm",
    "kubernetes": "worker.clusters.kubernetes:Kubernetes",
    "ray": "worker.clusters.ray:Ray",
}


class PlacementRejected(HalfstepError):
    """The cluster responds, but rejects the workers of this run."""


@dataclass(frozen=True)
class Pilots:
    """The workers of one attempt: one per node."""

    run_id: int
    attempt: int
    nodes: int
    devices: int

    @property
    def name(self) -> str:
        """Unique name in the engine, which prevents a second start."""
        return f"halfstep-{self.run_id}-{self.attempt}"

    @property
    def command(self) -> list[str]:
        """The command to start on each node."""
        return [sys.executable, "-m", "worker.worker", "--only", str(self.run_id)]


@dataclass(frozen=True)
class PilotStatus:
    """State of pilots as reported by the engine, with its reason."""

    state: State
    reason: str


class Placement(Protocol):
    """Interface of an engine: four calls for a run, and a check of the cluster.

    Each call may be repeated; OSError is raised if the engine does not respond.
    """

    name: str

    def place(self, pilots: Pilots) -> None:
        """Start pilots, unless they were started. Raises PlacementRejected."""

    def poll(self, pilots: Pilots) -> PilotStatus:
        """Return whether pilots wait, run, or are gone."""

    def cancel(self, pilots: Pilots) -> None:
        """End pilots; they save a checkpoint if there is time."""

    def log(self, pilots: Pilots) -> str:
        """Return the end of the pilots' output."""

    def check(self) -> Iterator[Finding]:
        """Report unmet requirements of the cluster and, if possible, of one of its nodes."""


def open_placement(settings: Settings) -> Placement:
    """Return the engine of HALFSTEP_PLACEMENT. Raises Invalid."""
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
    """Return an identifier of this installation on a shared cluster."""
    return f"halfstep {hashlib.sha256(settings.database_url.encode()).hexdigest()[:16]}"
