"""`halfstep mcp`: a Model Context Protocol server for runs, over stdio.

Uses the official SDK (the extra `mcp`). Read-only unless started with --allow-writes; the token's
permissions apply in any case. Results are bounded, because they fill a model's context.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, cast

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from halfstep import __version__
from halfstep.api_client.errors import ApiError
from halfstep.client import Client
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunSummary

INSTRUCTIONS = """Runs of mixed-precision training, with their loss scale. A step is an attempted
optimizer step; a skipped one had gradients that were not finite. Begin with list_runs; findings say
in words what is wrong with a run and what to do."""
READS = ToolAnnotations(readOnlyHint=True, idempotentHint=True, openWorldHint=False)
WRITES = ToolAnnotations(readOnlyHint=False, destructiveHint=False, openWorldHint=False)
MOST_RUNS, MOST_LINES, MOST_POINTS, MOST_COMPARED = 50, 500, 500, 50
FEWEST_POINTS = 32
#: Metrics that one request names.
MOST_NAMED, LONGEST_NAME = 50, 200
STATUSES = 10  # the last changes of a run's status
SUMMARY = [
    "id",
    "name",
    "project",
    "recipe",
    "source",
    "precision",
    "status",
    "owner",
    "tags",
    "step",
    "steps_total",
    "skipped",
    "loss",
    "scale",
    "health",
    "steps_per_second",
    "examples_per_second",
    "seconds",
    "created_at",
    "error",
]

RunId = Annotated[int, Field(ge=1, description="Number of a run")]

P = ParamSpec("P")
R = TypeVar("R")


def serve(*, allow_writes: bool) -> None:
    """Serve until stdin ends."""
    with Client() as client:
        server_of(client, allow_writes=allow_writes).run("stdio")


def server_of(client: Client, *, allow_writes: bool = False) -> "MCPServer[Any]":
    """Return the server of these tools. allow_writes: those that queue runs, too."""
    server: MCPServer[Any] = MCPServer(
        "halfstep", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    for tool in _reading(client):
        server.add_tool(tool, annotations=READS, structured_output=False)
    for tool in _writing(client) if allow_writes else []:
        server.add_tool(tool, annotations=WRITES, structured_output=False)
    return server


def _reading(client: Client) -> list[Callable[..., Any]]:
    @_with_tool_errors
    def list_runs(
        filter: Annotated[  # noqa: A002 - as the API calls it
            str,
            Field(
                description="Words that all hold: a text, status:failed, since:7d, tag:lr, "
                "owner:me, skips>10, lr>0.01, val/accuracy>0.9; - before one: not so"
            ),
        ] = "",
        sort: Annotated[
            str, Field(description="A column, setting or metric, as loss; -loss: downwards")
        ] = "-id",
        limit: Annotated[int, Field(ge=1, le=MOST_RUNS)] = 20,
    ) -> dict[str, Any]:
        """List runs, newest first."""
        rows = client.runs(filter, sort=sort, limit=limit)
        return {"runs": [_summary(run) for run in rows]}

    @_with_tool_errors
    def show_run(run_id: RunId) -> dict[str, Any]:
        """Show a run: its progress, configuration and latest status changes."""
        run = client.run(run_id)
        return cast("JsonObject", run) | {"statuses": run["statuses"][-STATUSES:]}

    @_with_tool_errors
    def findings(run_id: RunId) -> dict[str, Any]:
        """Return problems of a run and fixes, most severe first; empty if there are none."""
        return {"findings": client.findings(run_id)}

    @_with_tool_errors
    def series(
        run_id: RunId,
        names: Annotated[
            list[str] | None,
            Field(description="Names of series or metrics; default: all series and 100 metrics"),
        ] = None,
        first: Annotated[int, Field(ge=1)] = 1,
        last: Annotated[int | None, Field(ge=1)] = None,
        points: Annotated[int, Field(ge=FEWEST_POINTS, le=MOST_POINTS)] = 64,
    ) -> dict[str, Any]:
        """Return a run's loss, scale, grad_norm, lr and metrics, downsampled with all extremes."""
        named = [name for name in names or [] if len(name) <= LONGEST_NAME][:MOST_NAMED]
        page = client.chart(run_id, first=first, last=last, points=points, metrics=named)
        lines = {**page["metrics"], **page["series"]}
        return {
            "steps": page["total"],
            "skipped": page["skips"],
            "nonfinite_losses": page["nonfinite"],
            "series": {
                name: {
                    "step": page["x"] if line["x"] is None else line["x"],
                    "value": [_short(value) for value in line["y"]],
                }
                for name, line in lines.items()
                if names is None or name in names
            },
        }

    @_with_tool_errors
    def log(
        run_id: RunId, lines: Annotated[int, Field(ge=1, le=MOST_LINES)] = 100
    ) -> dict[str, Any]:
        """Return the latest lines of a run's log."""
        return {"lines": client.log(run_id, last=lines)}

    @_with_tool_errors
    def compare(
        run_ids: Annotated[list[RunId], Field(min_length=2, max_length=MOST_COMPARED)],
    ) -> dict[str, Any]:
        """Compare runs: the summary of each, and the settings in which they differ."""
        comparison = client.compare(run_ids)
        return {
            "runs": [_summary(row["run"]) for row in comparison["runs"]],
            "differences": comparison["differences"],
            "missing": comparison["missing"],
        }

    @_with_tool_errors
    def recipes() -> dict[str, Any]:
        """Return the recipes, each with the JSON Schema of its configuration."""
        return {"recipes": client.recipes()}

    return [list_runs, show_run, findings, series, log, compare, recipes]


def _writing(client: Client) -> list[Callable[..., Any]]:
    @_with_tool_errors
    def submit(
        recipe: str,
        config: dict[str, Any] | None = None,
        name: str = "",
        tags: list[str] | None = None,
    ) -> dict[str, Any]:
        """Queue a run. Missing configuration fields get the recipe's defaults."""
        return _summary(client.submit(recipe, config, name=name, tags=tags or ()))

    @_with_tool_errors
    def fork(
        run_id: RunId,
        config: Annotated[dict[str, Any] | None, Field(description="Settings to change")] = None,
        step: Annotated[int | None, Field(description="Checkpoint's step; default: newest")] = None,
        name: str = "",
    ) -> dict[str, Any]:
        """Queue a run that starts from a checkpoint of another run, with its configuration."""
        return _summary(client.fork(run_id, config, step=step, name=name))

    return [submit, fork]


def _with_tool_errors(tool: Callable[P, R]) -> Callable[P, R]:
    """Return the tool with API errors converted to tool errors."""

    @wraps(tool)
    def wrapped(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return tool(*arguments, **named)
        except ApiError as error:
            raise ToolError(str(error)) from error

    return wrapped


def _summary(run: "RunSummary") -> dict[str, Any]:
    fields = cast("JsonObject", run)
    return {name: fields[name] for name in SUMMARY if name in fields}


def _short(value: Any) -> Any:
    """Return a number with the digits that a reader has use for."""
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
