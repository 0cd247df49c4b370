"""Tools that read runs."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field

from halfstep.client import Client
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import AdvisedFinding, RunSummary

MOST_RUNS, MOST_LINES, MOST_POINTS, MOST_COMPARED = 50, 500, 500, 50
FEWEST_POINTS = 32
#: Metrics that one request names.
MOST_NAMED, LONGEST_NAME = 50, 200
MOST_FINDINGS, FIRST_SKIPS, MOST_CULPRITS = 10, 5, 5
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


def tools(client: Client) -> list[Callable[..., JsonObject]]:
    """Return the tools that read."""

    def list_runs(
        filter: Annotated[  # noqa: A002 - as the API calls it
            str,
            Field(
                description="Terms combined with AND: a text, status:failed, since:7d, tag:lr, "
                "owner:me, skips>10, lr>0.01, val/accuracy>0.9; - negates a term"
            ),
        ] = "",
        sort: Annotated[
            str, Field(description="Column, setting or metric, such as loss; -loss: descending")
        ] = "-id",
        limit: Annotated[int, Field(ge=1, le=MOST_RUNS)] = 20,
    ) -> JsonObject:
        """List runs, newest first, and the total number of matches."""
        page = client.run_page(filter, sort=sort, limit=limit)
        return {"runs": [summary(client, run) for run in page["runs"]], "total": page["total"]}

    def show_run(run_id: RunId) -> JsonObject:
        """Show a run: its progress, configuration and latest status changes."""
        run = client.run(run_id)
        shown = {"url": client.page_url(run_id), "statuses": run["statuses"][-STATUSES:]}
        return cast("JsonObject", run) | shown

    def explain_run(run_id: RunId) -> JsonObject:
        """Explain how a run does: its state, problems with evidence and fixes, the latest skips.

        The key `action` of a suggested action is for queue_fix. A finding that is not certain does
        not exclude other causes. Without a finding nothing wrong is known.
        """
        run = client.run(run_id)
        return {
            **{"run": summary(client, run), "url": client.page_url(run_id)},
            "findings": [
                _explain(client, finding) for finding in client.findings(run_id)[:MOST_FINDINGS]
            ],
            "skipped": {
                "count": run["skipped"],
                "of_steps": run["own_steps"],
                "first": list(islice(_skips(client, run_id), FIRST_SKIPS)),
            },
            "nonfinite_losses": _nonfinite_losses(client, run_id),
            "status_changes": run["statuses"][-STATUSES:],
        }

    def series(
        run_id: RunId,
        names: Annotated[
            list[str] | None,
            Field(description="Names of series or metrics; default: all series and 100 metrics"),
        ] = None,
        first: Annotated[int, Field(ge=1)] = 1,
        last: Annotated[int | None, Field(ge=1)] = None,
        points: Annotated[int, Field(ge=FEWEST_POINTS, le=MOST_POINTS)] = 64,
    ) -> JsonObject:
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
                    "value": line["y"],
                }
                for name, line in lines.items()
                if names is None or name in names
            },
        }

    def log(run_id: RunId, lines: Annotated[int, Field(ge=1, le=MOST_LINES)] = 100) -> JsonObject:
        """Return the latest lines of a run's log."""
        return {"lines": client.log(run_id, last=lines)}

    def compare(
        run_ids: Annotated[list[RunId], Field(min_length=2, max_length=MOST_COMPARED)],
    ) -> JsonObject:
        """Compare runs: the summary of each, and the settings in which they differ."""
        comparison = client.compare(run_ids)
        return {
            "runs": [summary(client, row["run"]) for row in comparison["runs"]],
            "differences": comparison["differences"],
            "missing": comparison["missing"],
        }

    def recipes() -> JsonObject:
        """Return the recipes, each with the JSON Schema of its configuration."""
        return {"recipes": client.recipes()}

    return [list_runs, show_run, explain_run, series, log, compare, recipes]


def summary(client: Client, run: "RunSummary") -> JsonObject:
    """Return the main fields of a run, and the address of its page."""
    fields = cast("JsonObject", run)
    shown = {name: fields[name] for name in SUMMARY if name in fields}
    return shown | {"url": client.page_url(run["id"])}


def _explain(client: Client, finding: "AdvisedFinding") -> JsonObject:
    """Return a finding whose actions have names."""
    names = ("title", "text", "module", "cause", "fix", "is_certain")
    fields = cast("JsonObject", finding)
    return {
        **{name: fields[name] for name in names if fields[name] not in (None, "")},
        "first_step": finding["before"],
        "help": client.url_of(finding["help"]) if finding["help"] else None,
        "actions": [
            {
                "action": action["label"],
                "settings": action["settings"],
                "from_step": action["step"],
                "form": client.url_of(action["address"]),
            }
            for action in finding["actions"]
        ],
    }


def _nonfinite_losses(client: Client, run_id: int) -> JsonObject:
    """Return how many losses are not finite, and the step of the first one.

    The step is "unknown" if the run goes back to an earlier checkpoint between the requests.
    """
    page = client.chart(run_id, points=MOST_POINTS)
    total = page["nonfinite"]["total"]
    if not total:
        return {"count": 0, "first_step": None}
    while (steps := page["nonfinite"]["steps"]) and page["bucket"] > 1:
        first, last = steps[0], steps[0] + page["bucket"] - 1  # a tick is the start of a bucket
        page = client.chart(run_id, first=first, last=last, points=MOST_POINTS)
    return {"count": total, "first_step": steps[0] if steps else "unknown"}


def _skips(client: Client, run_id: int) -> Iterator[JsonObject]:
    for event in client.events(run_id):
        if event["kind"] == "skip":
            yield {
                "step": event["step"],
                "scale_before": event["scale_before"],
                "scale_after": event["scale_after"],
                "loss_nonfinite": event["loss_nonfinite"],
                "overflowed": [culprit["name"] for culprit in event["culprits"][:MOST_CULPRITS]],
            }
