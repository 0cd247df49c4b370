"""Tools that queue runs."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from halfstep.api_client.errors import ApiError
from halfstep.client import Client
from halfstep.mcp.reading import RunId, summary
from halfstep.session.nesting import merged
from halfstep.telemetry.plain_json import JsonObject

FP32_MODULES = "modules.fp32"  # an action names one more


def tools(client: Client) -> list[Callable[..., JsonObject]]:
    """Return the tools that write."""

    def submit(
        recipe: str,
        config: dict[str, Any] | None = None,
        name: str = "",
        tags: list[str] | None = None,
    ) -> JsonObject:
        """Queue a run. Missing configuration fields get the recipe's defaults."""
        return summary(client, client.submit(recipe, config, name=name, tags=tags or ()))

    def fork(
        run_id: RunId,
        config: Annotated[dict[str, Any] | None, Field(description="Settings to change")] = None,
        step: Annotated[int | None, Field(description="Checkpoint's step; default: newest")] = None,
        name: str = "",
    ) -> JsonObject:
        """Queue a run that starts from a checkpoint of another run, with its configuration."""
        return summary(client, client.fork(run_id, config, step=step, name=name))

    def queue_fix(
        run_id: RunId,
        action: Annotated[str, Field(description="The `action` of a finding of explain_run")],
        confirm: Annotated[
            bool, Field(description="False: only return what would be queued; ask the user first")
        ] = False,
    ) -> JsonObject:
        """Queue a run with the suggested action of a finding: a fork, or a new run from step 0."""
        known = {
            each["label"]: each
            for finding in client.findings(run_id)
            for each in finding["actions"]
        }
        if action not in known:
            allowed = ", ".join(map(repr, known)) or "none: the run has no suggested action"
            raise ApiError(404, f"action is {action[:200]!r}; allowed: {allowed}")
        settings, step = known[action]["settings"], known[action]["step"]
        parent = client.run(run_id)
        changes = _nested(settings, parent["config"])
        start = f"from run {run_id}'s checkpoint at step {step}" if step else "from step 0"
        if not confirm:
            return {"would_queue": {"settings": settings, "starts": start}, "confirm": "needed"}
        if step is not None:
            run = client.fork(run_id, changes, step=step)
        else:
            project = {"project": parent["project"]}
            run = client.submit(parent["recipe"], merged(parent["config"], changes), **project)
        return summary(client, run) | {"starts": start}

    return [submit, fork, queue_fix]


def _nested(settings: JsonObject, config: JsonObject) -> JsonObject:
    """Return settings by path as a configuration; modules in fp32 are added to the present ones."""
    nested: JsonObject = {}
    for path, value in settings.items():
        *groups, name = path.split(".")
        place, present = nested, config
        for group in groups:
            place, present = place.setdefault(group, {}), present.get(group, {})
        if path == FP32_MODULES:
            value = list(dict.fromkeys([*present.get(name, []), *value]))
        place[name] = value
    return nested
