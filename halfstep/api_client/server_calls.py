"""Client calls about recipes, projects and workers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from halfstep.api_client.connection import Connection
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ProjectRow, WorkerState


class ServerCalls(Connection):
    """The part of `halfstep.Client` for recipes, projects and workers."""

    def recipes(self) -> list[JsonObject]:
        """Return the recipes, each with the JSON Schema of its configuration."""
        return self._get("/api/v1/recipes")

    def projects(self) -> "list[ProjectRow]":
        """Return the projects visible to the user, with their quotas and permissions."""
        return self._get("/api/v1/projects")

    def make_project(self, name: str) -> "ProjectRow":
        """Create a project. For admins."""
        return self._post("/api/v1/projects", {"name": name})

    def rename_project(self, name: str, new_name: str) -> "ProjectRow":
        """Rename a project. For admins."""
        body = {"name": name, "new_name": new_name}
        return self._patch("/api/v1/projects/name", body)

    def delete_project(self, name: str) -> None:
        """Delete a project that has no runs, with its sweeps. For admins."""
        self._delete("/api/v1/projects", {"name": name})

    def workers(self) -> "Iterator[WorkerState]":
        """Yield the workers, in the order of their registration."""
        return self._pages("/api/v1/workers", "workers")

    def drain_worker(self, worker_id: int, *, stop: bool = False) -> "WorkerState":
        """Stop a worker from taking runs. stop: also return its current runs to the queue."""
        return self._post(f"/api/v1/workers/{worker_id}/drain", {"stop": stop})

    def undrain_worker(self, worker_id: int) -> "WorkerState":
        """Let a worker take runs again."""
        return self._post(f"/api/v1/workers/{worker_id}/undrain")
