"""`halfstep run series, events, findings, compare, parity, precision-…`: numbers of runs."""

import csv
import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfstep import number_formats
from halfstep.cli import formats
from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson, MaxError, MinCosine, RunId, RunIds
from halfstep.cli.output import print_json, print_list, print_result, warn

if TYPE_CHECKING:
    from halfstep.api_client.response_types import (
        ComparedRun,
        Event,
        PlanModule,
        PlanPoint,
        PrecisionDiffRow,
        RunSummary,
    )


#: Of the modules that a precision diff lists by the error that they cause.
CAUSES_SHOWN = 10


def add_to(app: App) -> None:
    """Add the commands to the group `run`."""
    for command in (series, events, findings, compare, parity, precision_diff, precision_plan):
        app.command(command.__name__.replace("_", "-"))(command)


def series(
    run_id: RunId,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Logged metrics instead of steps")
    ] = False,
    first: Annotated[int, typer.Option(help="First step")] = 0,
    last: Annotated[int | None, typer.Option(help="Last step; default: the newest")] = None,
    points: Annotated[
        int | None,
        typer.Option(help="Downsample to 32 to 5000 points, keeping extremes; default: all points"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every step of a run, or every metric, as CSV; `--points 200` downsamples.

    flags is a sum of 1: the step was skipped; 2: the loss is not finite; 4: the norm exceeds fp32;
    16: the loss is unknown; 32: the norm is unknown; 256: the first optimizer skipped; 512: the
    second did; … An empty field, or null, is unknown.
    """
    from halfstep.client import Client
    from halfstep.telemetry.plain_json import json_safe

    with Client() as client:
        read = client.metrics if metrics else client.series
        lines = read(run_id, first=first, last=last, points=points)
    columns = lines.cells()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if not as_json:
        writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        if as_json:
            print(json.dumps(json_safe(dict(zip(columns, row, strict=True)))))
        else:
            writer.writerow(map(json_safe, row))


def events(run_id: RunId, as_json: AsJson = False) -> None:
    """List scaler events: skips with their culprits, growth and backoff."""
    with connect() as client:
        columns = ("Step", "Kind", "Scale", "Culprits")
        print_list(client.events(run_id), columns, _event_row, as_json=as_json)


def _event_row(event: "Event") -> tuple[str, ...]:
    before, after = number_formats.scale(event["scale_before"]), event["scale_after"]
    change = f"{before} → {number_formats.scale(after)}"
    culprits = ", ".join(culprit["name"] for culprit in event["culprits"])
    return f"{event['step']:,}", event["kind"], change, culprits


def findings(run_id: RunId, as_json: AsJson = False) -> None:
    """Print the findings of a run, the most severe first."""
    with connect() as client:
        rows = client.findings(run_id)
    if as_json:
        print_json(rows)
        return
    if not rows:
        warn("No findings.")
    for finding in rows:
        print(f"{finding['title']}\n  {finding['text']}")


def precision_diff(
    run_id: RunId,
    request: Annotated[
        bool, typer.Option("--request", help="Request a diff of the next step of a running run")
    ] = False,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", min=1, help="Queue a run that measures a diff at this checkpoint"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's last precision diff: errors by module against fp32, and what needs fp32."""
    with connect() as client:
        if checkpoint is not None:
            _print_measurement(client.request_checkpoint_diff(run_id, checkpoint), as_json=as_json)
            return
        if request:
            accepted = client.request_precision_diff(run_id)
            text = f"run {run_id}: requested a precision diff of the next step"
            print_result(accepted, text, as_json=as_json)
            return
        diff = client.precision_diff(run_id)
    if diff is None:
        warn(
            f"run {run_id} has no precision diff of its own: --checkpoint STEP queues a run that "
            "measures one, whose number it prints, and --request asks a running run for one"
        )
        raise typer.Exit(1)
    columns = ("Module", "Call", "Direction", "Error", "Local", "Inherited")
    print_list([diff] if as_json else diff["rows"], columns, _diff_row, as_json=as_json)
    if as_json:
        return
    for suggestion in diff["suggestions"]:
        print(f"Suggested for fp32: {suggestion['name']}: {suggestion['evidence'][0]}")
    if remains := diff.get("remains"):  # a server of another version sends none
        print(remains)
    if diff["causes"]:
        titles = ("Causes alone", "Error", "Operations", "Memory")
        print_list(diff["causes"][:CAUSES_SHOWN], titles, _cause_row, as_json=False)


def _cause_row(module: "PlanModule") -> tuple[str, ...]:
    [error] = module["errors"].values()
    shares = (number_formats.percent(float(module[name] or 0)) for name in ("operations", "memory"))
    return module["role"], number_formats.number(error), *shares


def _diff_row(row: "PrecisionDiffRow") -> tuple[str, ...]:
    errors = (row["error"], row["local"], row["inherited"])
    numbers = map(number_formats.number, errors)
    return row["name"], str(row["call"] or ""), row["direction"], *numbers


def precision_plan(
    run_id: RunId,
    request: Annotated[
        bool, typer.Option("--request", help="Queue a run that plans with checkpoints of this run")
    ] = False,
    checkpoint: Annotated[
        list[int] | None,
        typer.Option(
            metavar="STEP", min=1, help="With --request: checkpoint, up to three; repeatable"
        ),
    ] = None,
    no_fresh: Annotated[
        bool, typer.Option("--no-fresh", help="With --request: without initial weights")
    ] = False,
    max_error: MaxError = 0.1,
    min_cosine: MinCosine = 0.99,
    as_json: AsJson = False,
) -> None:
    """Print the precision plan that a run has measured: the fastest mixes within a bound."""
    with connect() as client:
        if request:
            run = client.request_precision_plan(
                run_id,
                *(checkpoint or ()),
                fresh_weights=not no_fresh,
                max_error=max_error,
                min_cosine=min_cosine,
            )
            _print_measurement(run, as_json=as_json)
            return
        plan = client.precision_plan(run_id)
    if plan is None:
        warn(f"run {run_id} has no precision plan; add --request to queue one")
        raise typer.Exit(1)
    if as_json:
        print_json([plan])
        return
    for line in plan["sentences"]:
        print(line)
    columns = ("Mix", "Error", "Cosine", "Time", "Memory")
    print_list(plan["points"], columns, _point_row, as_json=False)


def _print_measurement(run: "RunSummary", *, as_json: bool) -> None:
    text = f"run {run['id']}  {formats.state(run)}  {run['name']}"
    print_result(run, text, as_json=as_json)


def _point_row(point: "PlanPoint") -> tuple[str, ...]:
    cosine = number_formats.number(point["cosine"], 6)
    time, memory = (number_formats.number(point[name], 3) for name in ("time", "memory"))
    return point["label"], number_formats.number(point["error"]), cosine, time, memory


def compare(run_ids: RunIds, as_json: AsJson = False) -> None:
    """Compare runs: summary values, best values, and the settings that differ."""
    with connect() as client:
        comparison = client.compare(run_ids)
    rows = [
        {"run": row["run"]["id"], "name": row["run"]["name"], "status": row["run"]["status"]}
        | {"step": row["run"]["step"], "skipped": row["run"]["skipped"]}
        | {name: figure["value"] for name, figure in row["figures"].items()}
        | {f"best {name}": figure["value"] for name, figure in row["best"].items()}
        | {path: values[index] for path, values in comparison["differences"].items()}
        for index, row in enumerate(comparison["runs"])
    ]
    if as_json:
        print_json(rows)
    else:
        _print_comparison(comparison["runs"], rows)
    if comparison["missing"]:
        warn(f"left out, because they do not exist: {', '.join(map(str, comparison['missing']))}")


def parity(
    run_ids: RunIds,
    metric: Annotated[str, typer.Option(help="Default: the first metric, else the loss")] = "",
    margin: Annotated[
        float | None,
        typer.Option(help="Largest difference that does not matter, such as 1 % of the metric"),
    ] = None,
    group: Annotated[
        str, typer.Option(help="Setting; default: the precision, else the only one that differs")
    ] = "",
    value: Annotated[
        Literal["final", "area", "time_to_target"],
        typer.Option(help="The last value; the mean over the curve; seconds until --target"),
    ] = "final",
    target: Annotated[
        float | None, typer.Option(help="Value of the metric, for the time to a target")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare precisions, or values of another setting, over seeds that their runs share."""
    with connect() as client:
        result = client.parity(
            run_ids, metric, margin=margin, group=group, value=value, target=target
        )
    if as_json:
        print_json([result])
        return
    for row in result["groups"]:
        print(row["sentence"])
    if result["reason"]:
        warn(f"unknown: {result['reason']}")
    if result["unpaired"] and result["groups"]:
        warn(f"not paired: {', '.join(map(str, result['unpaired']))}")


def _print_comparison(compared: "list[ComparedRun]", rows: list[dict[str, object]]) -> None:
    """Print a table with a column per run; on a narrow terminal several tables."""
    from halfstep.cli.tables import parts, print_tables, table

    fields = {
        "Status": [formats.state(row["run"]) for row in compared],
        "Step": [formats.progress(row["run"]) for row in compared],
        "Scale": [formats.run_scale(row["run"]) for row in compared],
        "Skipped": [formats.format_skipped(row["run"]) for row in compared],
        "Health": [formats.health(row["run"]) for row in compared],
        "ETA": [number_formats.duration(row["run"]["seconds_left"]) for row in compared],
    }
    names = dict.fromkeys(name for row in rows for name in [*row][5:])
    fields |= {name: [_cell(row, name) for row in rows] for name in names}
    heads = [f"{row['run']} {row['name']}" for row in rows]
    columns = [
        [head, *cells]
        for head, cells in zip(heads, zip(*fields.values(), strict=True), strict=True)
    ]
    print_tables(
        *(
            table(("Field", *heads[part]), [(name, *cells[part]) for name, cells in fields.items()])
            for part in parts(["Field", *fields], columns)
        )
    )


def _cell(row: dict[str, object], name: str) -> str:
    if name not in row:
        return number_formats.UNKNOWN
    value = row[name]
    return (
        number_formats.metric(value, name)
        if isinstance(value, float)
        else number_formats.setting(value)
    )
