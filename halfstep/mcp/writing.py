"""Tools that queue runs, each after a confirmation by the person."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import Field

from halfstep.api_client.errors import ApiError
from halfstep.client import Client
from halfstep.mcp.confirmation import Answer, Confirmation, check, form, question
from halfstep.mcp.reading import RunId, summary
from halfstep.mcp.tool_errors import tool_errors
from halfstep.session.nesting import merge
from halfstep.telemetry.plain_json import JsonObject

FP32_MODULES = "modules.fp32"  # an action names one more

Config = Annotated[dict[str, Any] | None, Field(description="Settings to change")]
Step = Annotated[int | None, Field(description="Checkpoint's step; default: newest")]
Action = Annotated[str, Field(description="`action` of a finding from explain_run")]


def tools(client: Client) -> list[Callable[..., JsonObject]]:
    """Return the tools that write."""

    @tool_errors
    def ask_submit(
        context: "Context[Any, Any]",
        recipe: str,
        config: dict[str, Any] | None,
        name: str,
        tags: list[str] | None,
    ) -> Elicit[Answer]:
        run = {"recipe": recipe, "settings": config or {}, "name": name, "tags": tags or []}
        return question(context, run, form(client, config, recipe=recipe))

    def submit(
        confirmation: Annotated[Confirmation, Resolve(ask_submit)],
        recipe: str,
        config: dict[str, Any] | None = None,
        name: str = "",
        tags: list[str] | None = None,
    ) -> JsonObject:
        """Queue a run, once the person confirms. Missing settings get the recipe's defaults."""
        check(confirmation)
        return summary(client, client.submit(recipe, config, name=name, tags=tags or ()))

    @tool_errors
    def ask_fork(
        context: "Context[Any, Any]",
        run_id: int,
        config: dict[str, Any] | None,
        step: int | None,
        name: str,
    ) -> Elicit[Answer]:
        start = "newest" if step is None else step
        run = {"fork of run": run_id, "checkpoint": start, "settings": config or {}, "name": name}
        return question(context, run, form(client, config, from_=run_id, step=step))

    def fork(
        confirmation: Annotated[Confirmation, Resolve(ask_fork)],
        run_id: RunId,
        config: Config = None,
        step: Step = None,
        name: str = "",
    ) -> JsonObject:
        """Queue a run from a checkpoint of another one, once the person confirms."""
        check(confirmation)
        return summary(client, client.fork(run_id, config, step=step, name=name))

    @tool_errors
    def ask_fix(context: "Context[Any, Any]", run_id: int, action: str) -> Elicit[Answer]:
        fix = _fix(client, run_id, action)
        return question(context, {"settings": fix.settings, "starts": fix.start}, fix.page)

    def queue_fix(
        confirmation: Annotated[Confirmation, Resolve(ask_fix)], run_id: RunId, action: Action
    ) -> JsonObject:
        """Queue a run with the suggested action of a finding, once the person confirms.

        It is a fork of the run, or a new run from step 0.
        """
        check(confirmation)
        fix = _fix(client, run_id, action)
        parent = client.run(run_id)
        changes = _nest(fix.settings, parent["config"])
        if fix.step is not None:
            run = client.fork(run_id, changes, step=fix.step)
        else:
            project = {"project": parent["project"]}
            run = client.submit(parent["recipe"], merge(parent["config"], changes), **project)
        return summary(client, run) | {"starts": fix.start}

    return [submit, fork, queue_fix]


class Fix(NamedTuple):
    """A suggested action of a finding."""

    settings: JsonObject
    step: int | None
    start: str
    page: str


def _fix(client: Client, run_id: int, action: str) -> Fix:
    """Return the action of that name. Raises ApiError."""
    known = {
        action["label"]: action
        for finding in client.findings(run_id)
        for action in finding["actions"]
    }
    if action not in known:
        allowed = ", ".join(map(repr, known)) or "none: the run has no suggested action"
        raise ApiError(404, f"action is {action[:200]!r}; allowed: {allowed}")
    step = known[action]["step"]
    start = f"from run {run_id}'s checkpoint at step {step}" if step else "from step 0"
    return Fix(known[action]["settings"], step, start, client.url_of(known[action]["address"]))


def _nest(settings: JsonObject, config: JsonObject) -> JsonObject:
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
