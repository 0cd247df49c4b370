"""Client calls about sweeps, also of those whose points agents take."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from halfstep.api_client.connection import Connection, page_size
from halfstep.api_client.polling import AWAY_SECONDS, ENDED, POLL_SECONDS, patiently
from halfstep.api_client.run_calls import command_of
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import Claim, SweepDetail, SweepSummary, SweepTrial


class SweepCalls(Connection):
    """The part of `halfstep.Client` for sweeps."""

    def begin_sweep(
        self,
        recipe: str,
        space: Mapping[str, str | Sequence[Any] | Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        *,
        kind: str = "grid",
        pruner: str | JsonObject | None = None,
        metric: str = "loss",
        goal: str = "",
        runs: int | None = None,
        at_once: int = 1,
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "SweepDetail":
        """Start a sweep: runs that differ in the settings in `space`.

        space: by path of a setting, a list of values, or "16..64 step 16", "uniform(a, b)",
        "loguniform(a, b)", "integers(a, b)", "normal(mean, std)".  kind: grid, random, tpe, cmaes
        or qmc.  pruner: hyperband, median or patient, or an object with further settings, see
        docs/reference/client.md.  goal: minimize or maximize; by default derived from the metric's
        name.  further: seed, name, priority, preemptible, nodes, devices_per_node.
        """
        body: JsonObject = {"recipe": recipe, "space": dict(space)}
        body["config"] = dict(config or {})
        body |= {"kind": kind, "metric": metric, "goal": goal, "runs": runs, "at_once": at_once}
        body["pruner"] = _pruner(pruner)
        return self._post("/api/v1/sweeps", body | {"tags": ", ".join(tags), **further})

    def sweep_command(
        self,
        line: str,
        space: Mapping[str, str | Sequence[Any] | Mapping[str, Any]],
        parameters: Mapping[str, str | int | float | bool] | None = None,
        *,
        folder: str = "",
        git: str = "",
        commit: str = "",
        venv: str = "",
        variables: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        schema: Mapping[str, Mapping[str, Any]] | None = None,
        **further: Any,
    ) -> "SweepDetail":
        """Start a sweep of a command line: runs that differ in the placeholders in `space`.

        parameters: a value for each other placeholder.  further: see `begin_sweep`; the rest: see
        `submit_command`.
        """
        command = command_of(line, folder, git, commit, venv, variables, secrets, schema)
        return self.begin_sweep("", space, parameters, command=command, **further)

    def sweeps(self, *, limit: int | None = None) -> "Iterator[SweepSummary]":
        """Yield sweeps, newest first. limit: most of them; None: all."""
        query = {"limit": page_size(limit)}
        rows = self._pages("/api/v1/sweeps", "sweeps", query, cursor="before")
        return islice(rows, limit)

    def sweep(self, sweep_id: int) -> "SweepDetail":
        """Return one sweep: its progress, and its best run so far."""
        return self._get(f"/api/v1/sweeps/{sweep_id}")

    def trials(self, sweep_id: int) -> "list[SweepTrial]":
        """Return a sweep's runs with their settings and values, the best first."""
        query = {"sort": "value", "limit": 1000}
        return list(self._pages(f"/api/v1/sweeps/{sweep_id}/trials", "trials", query))

    def extend_sweep(
        self, sweep_id: int, *, runs: int | None = None, space: Mapping[str, Any] | None = None
    ) -> "SweepDetail":
        """Add runs to a sweep; to a grid, more values of its settings."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/extension", {"runs": runs, "space": space})

    def rank_sweep(self, sweep_id: int, metric: str, *, goal: str = "") -> "SweepDetail":
        """Compare a sweep's runs by another metric, also those that have ended."""
        body = {"metric": metric, "goal": goal}
        return self._put(f"/api/v1/sweeps/{sweep_id}/metric", body)

    def move_sweep(self, sweep_id: int, *, project: str) -> "SweepDetail":
        """Move a sweep and all of its runs to another project."""
        return self._put(f"/api/v1/sweeps/{sweep_id}/project", {"project": project})

    def pause_sweep(self, sweep_id: int) -> "SweepDetail":
        """Pause a sweep: it submits no more runs; runs under way continue."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/pause")

    def resume_sweep(self, sweep_id: int) -> "SweepDetail":
        """Resume a paused or failed sweep."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/resumption")

    def retry_sweep(self, sweep_id: int) -> "SweepDetail":
        """Run the failed points of a sweep again, each as a new run."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/retries")

    def cancel_sweep(self, sweep_id: int) -> "SweepDetail":
        """Cancel a sweep, and its queued and training runs."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/cancellation")

    def wait_for_sweep(
        self,
        sweep_id: int,
        *,
        patience: float = AWAY_SECONDS,
        on_outage: Callable[[str], None] = lambda text: None,
    ) -> "SweepDetail":
        """Return the sweep once it has ended or failed.

        patience, on_outage: see `follow`.
        """
        sweep: SweepDetail | None = None
        while sweep is None or sweep["status"] not in ENDED:
            if sweep:
                time.sleep(POLL_SECONDS)
            sweep = patiently(lambda: self.sweep(sweep_id), patience, on_outage)
        return sweep

    def begin_agent_sweep(
        self,
        space: Mapping[str, str | Sequence[Any] | Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        *,
        kind: str = "grid",
        pruner: str | JsonObject | None = None,
        metric: str = "loss",
        goal: str = "",
        runs: int | None = None,
        **further: Any,
    ) -> "SweepDetail":
        """Begin a sweep of any script, whose points `halfstep.agent` or `halfstep agent` takes.

        space, kind, pruner: as in `begin_sweep`.  further: seed, name, tags, project.
        """
        body: JsonObject = {"space": dict(space), "config": dict(config or {}), "kind": kind}
        body |= {"metric": metric, "goal": goal, "runs": runs, "pruner": _pruner(pruner), **further}
        return self._post("/api/v1/sweeps/agents", body)

    def claim_point(self, sweep_id: int, agent: str) -> "Claim":
        """Take a point of a sweep. agent: 32 hexadecimal digits that the agent has chosen."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/claims", {"agent": agent})

    def renew_claim(self, sweep_id: int, number: int, agent: str) -> bool:
        """Renew the lease of a point; return whether its run goes on.

        Raises ApiError with status 409 if another agent may have it.
        """
        path = f"/api/v1/sweeps/{sweep_id}/claims/{number}"
        return bool(self._put(path, {"agent": agent})["is_active"])

    def end_claim(self, sweep_id: int, number: int, agent: str, *, was_watched: bool) -> None:
        """Record that the script of a point has ended. was_watched: it called `halfstep.watch`."""
        path = f"/api/v1/sweeps/{sweep_id}/claims/{number}/end"
        self._post_only(path, {"agent": agent, "was_watched": was_watched})

    def return_claim(self, sweep_id: int, number: int, agent: str) -> None:
        """Give a point back, for another agent."""
        self._post_only(f"/api/v1/sweeps/{sweep_id}/claims/{number}/return", {"agent": agent})


def _pruner(given: str | JsonObject | None) -> JsonObject | None:
    return {"kind": given} if isinstance(given, str) else given
