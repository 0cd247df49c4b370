"""The lineage of a version of an artifact: runs and versions before and after it."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import (
    MADE,
    NOT_DELETED,
    USED,
    ArtifactCollection,
    ArtifactLink,
    ArtifactVersion,
    Run,
)

#: Limits of a graph: nodes, and steps away from the version.
MOST_NODES, MOST_LAYERS = 60, 6


@dataclass(frozen=True)
class Node:
    """A run or a version. layer: negative before the version, positive after it."""

    key: str
    kind: Literal["run", "version"]
    name: str
    layer: int


@dataclass(frozen=True)
class Lineage:
    """Runs and versions before and after a version, with the edges between them."""

    nodes: list[Node]
    edges: list[tuple[str, str]]
    is_cut: bool  # there are more nodes

    @property
    def layers(self) -> list[list[Node]]:
        """Nodes by layer, the earliest first."""
        by_layer: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            by_layer[node.layer].append(node)
        return [by_layer[layer] for layer in sorted(by_layer)]


def lineage(session: Session, version_id: int) -> Lineage:
    """Return the visible runs and versions before and after a version.

    Before: the runs that made it, the versions that those used, and so on; after: likewise.
    """
    layers: dict[str, int] = {f"version-{version_id}": 0}
    edges: dict[tuple[str, str], None] = {}
    is_cut = False
    for direction in (-1, 1):
        frontier = [version_id]
        for distance in range(1, MOST_LAYERS + 1):
            links = _links(session, frontier, of_runs=distance % 2 == 0, direction=direction)
            frontier = []
            for run_id, linked_id in links:
                run, version = f"run-{run_id}", f"version-{linked_id}"
                key, number = (version, linked_id) if distance % 2 == 0 else (run, run_id)
                if key not in layers:
                    if len(layers) >= MOST_NODES:
                        is_cut = True
                        continue
                    layers[key] = direction * distance
                    frontier.append(number)
                is_made = (direction < 0) == (distance % 2 == 1)
                edges[(run, version) if is_made else (version, run)] = None
    names = _names(session, layers)
    nodes = [
        Node(key, "run" if key.startswith("run") else "version", names[key], layer)
        for key, layer in layers.items()
        if key in names
    ]
    return Lineage(nodes, [edge for edge in edges if edge[0] in names and edge[1] in names], is_cut)


def _links(
    session: Session, ids: list[int], *, of_runs: bool, direction: int
) -> list[tuple[int, int]]:
    """Return (run id, version id) of the next links from versions, or from runs.

    Before a version is the run that made it; before a run are the versions that it used.
    """
    role = MADE if (direction < 0) != of_runs else USED
    column = ArtifactLink.run_id if of_runs else ArtifactLink.version_id
    query = select(ArtifactLink.run_id, ArtifactLink.version_id)
    query = query.where(column.in_(ids), ArtifactLink.role == role)
    query = query.order_by(ArtifactLink.run_id, ArtifactLink.version_id).limit(10 * MOST_NODES)
    return [(row[0], row[1]) for row in session.execute(query)]


def _names(session: Session, keys: dict[str, int]) -> dict[str, str]:
    """Return the names of visible runs and versions by key."""
    ids: dict[str, list[int]] = {"run": [], "version": []}
    for key in keys:
        kind, _, number = key.partition("-")
        ids[kind].append(int(number))
    runs = select(Run.id, Run.name).where(Run.id.in_(ids["run"]), NOT_DELETED)
    names = {f"run-{row.id}": row.name for row in session.execute(runs)}
    query = select(ArtifactVersion.id, ArtifactVersion.number, ArtifactCollection.name)
    query = query.join(ArtifactCollection, ArtifactCollection.id == ArtifactVersion.collection_id)
    for row in session.execute(query.where(ArtifactVersion.id.in_(ids["version"]))):
        names[f"version-{row.id}"] = f"{row.name}:v{row.number}"
    return names
