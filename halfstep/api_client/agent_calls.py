"""Client calls of sweeps for agents."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import Claim, SweepDetail


class AgentCalls:
    """The part of `halfstep.Client` for sweeps whose points agents take."""

    _post: Callable[..., JsonObject]
    _put: Callable[..., JsonObject]
    _post_only: Callable[..., None]

    def begin_agent_sweep(
        self,
        space: Mapping[str, str | Sequence[Any] | Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        *,
        kind: str = "grid",
        metric: str = "loss",
        goal: str = "",
        runs: int | None = None,
        **further: Any,
    ) -> "SweepDetail":
        """Begin a sweep of any script, whose points `halfstep.agent` or `halfstep agent` takes.

        space: by name, a list of values, or "16..64 step 16", "uniform(a, b)", "loguniform(a, b)",
        "integers(a, b)".  kind: grid, random or tpe.  further: seed, name, tags, project.
        """
        body: JsonObject = {"space": dict(space), "config": dict(config or {}), "kind": kind}
        body |= {"metric": metric, "goal": goal, "runs": runs, **further}
        return cast("SweepDetail", self._post("/api/v1/sweeps/agents", body))

    def claim_point(self, sweep_id: int, agent: str) -> "Claim":
        """Take a point of a sweep. agent: 32 hexadecimal digits that the agent has chosen."""
        return cast("Claim", self._post(f"/api/v1/sweeps/{sweep_id}/claims", {"agent": agent}))

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
