"""`halfstep sweep COMMAND`: runs that differ in the settings that are searched."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfstep import number_formats
from halfstep.cli import formats
from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import (
    AsJson,
    Commit,
    Fields,
    Folder,
    Git,
    Line,
    Name,
    OtherProject,
    Parameters,
    PrecisionOption,
    Preemptible,
    Project,
    Secrets,
    SweepId,
    Tags,
    Variables,
    Venv,
    command_of,
    configuration,
    pairs,
    value_of,
)
from halfstep.cli.output import print_json, print_list, print_notes, print_result, warn

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ListedRun, SweepDetail, SweepSummary, SweepTrial

#: Of a command that waits for the end of a sweep.
EXIT_CODES = {"finished": 0, "failed": 3, "cancelled": 4}
#: Columns of `sweep show` about how far a run is.
LIVE = ("Step", "Loss", "Scale", "Skipped", "Health", "ETA")

Search = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=VALUES",
        help="Field and its values: 0.1, 0.01; 1..9 step 2; uniform(a, b), loguniform(a, b), "
        "integers(a, b), normal(mean, std), lognormal(mean, std); with 'step S', 'when FIELD = "
        "VALUES'; a JSON list; repeatable",
    ),
]

Goal = Annotated[
    str, typer.Option(help="minimize or maximize the metric; default: derived from its name")
]

app = App("Start, list, show, extend, rank, move, pause, resume, retry or cancel sweeps.")


@app.command()
def begin(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe, unless --command")] = "",
    search: Search = None,
    fields: Fields = None,
    precision: PrecisionOption = None,
    kind: Annotated[
        Literal["grid", "random", "tpe", "cmaes", "qmc"],
        typer.Option(help="How values are chosen"),
    ] = "grid",
    pruner: Annotated[
        Literal["hyperband", "median", "patient"] | None,
        typer.Option(help="Which runs end early; default: none"),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(
            help="First check of the pruner: of a recipe in 27ths of its steps, else after so many "
            "values of the metric; default: 1"
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric to compare by its last value")] = "loss",
    goal: Goal = "",
    runs: Annotated[
        int | None, typer.Option(help="Runs in total; default: all points of a grid, else 20")
    ] = None,
    at_once: Annotated[int, typer.Option(help="Runs that are queued or training at once")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of random values")] = 0,
    name: Name = "",
    project: Project = None,
    tags: Tags = None,
    preemptible: Preemptible = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait for the end: exit code 0, 3 if failed, 4 if cancelled"),
    ] = False,
    line: Line = "",
    parameters: Parameters = None,
    folder: Folder = "",
    git: Git = "",
    commit: Commit = "",
    venv: Venv = "",
    variables: Variables = None,
    secrets: Secrets = None,
    as_json: AsJson = False,
) -> None:
    """Begin a sweep: `sweep begin digits --search recipe.learning_rate='0.1, 0.01' --at-once 2`.

    Or of a command: `sweep begin --command 'python train.py --lr {lr}' --search lr='0.1, 0.01'`.
    """
    if bool(recipe) == bool(line):
        raise typer.BadParameter("use either a recipe or --command")
    if line and (fields or precision):
        raise typer.BadParameter(
            "--set and --precision are only for recipes; with --command use --param"
        )
    options: dict[str, Any] = {"kind": kind, "metric": metric, "goal": goal, "runs": runs}
    options |= {"at_once": at_once, "seed": seed, "name": name, "project": project}
    options |= {"preemptible": True} if preemptible else {}
    options["tags"] = tags or []
    if pruner:
        options["pruner"] = {"kind": pruner} | ({"first": first} if first else {})
    space = _space(search)
    command = (
        command_of(line, parameters, folder, git, commit, venv, variables, secrets, searched=space)
        if line
        else {}
    )
    with connect() as client:
        if line:
            sweep = client.sweep_command(space=space, **command, **options)
        else:
            sweep = client.begin_sweep(recipe, space, configuration(fields, precision), **options)
        _print_sweep(sweep, as_json=as_json)
        if wait:
            sweep = client.wait_for_sweep(sweep["id"], on_outage=warn)
            _print_sweep(sweep, as_json=as_json)
            raise typer.Exit(EXIT_CODES[sweep["status"]])


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(help="Maximum number of sweeps")] = 20,
    as_json: AsJson = False,
) -> None:
    """List sweeps, newest first."""
    with connect() as client:
        sweeps = list(client.sweeps(limit=limit + 1 if limit > 0 else limit))
    if is_cut := len(sweeps) > limit:
        sweeps.pop()
    columns = ("Sweep", "Name", "Status", "Runs", "Metric", "Best", "Reason")
    print_list(sweeps, columns, _sweep_row, as_json=as_json)
    notes = [f"the newest {limit:,} sweeps; --limit shows more"] if is_cut else []
    print_notes(notes, as_json=as_json)


def _sweep_row(sweep: "SweepSummary") -> tuple[str, ...]:
    ended = f"{_count_ended(sweep)} / {sweep['runs_total']}"
    best = number_formats.number(sweep["best"])
    status = formats.label(sweep["status"])
    fields = (str(sweep["id"]), sweep["name"], status, ended, sweep["metric"], best)
    return *fields, sweep["error"] or ""


@app.command()
def show(sweep_id: SweepId, as_json: AsJson = False) -> None:
    """Show a sweep and its runs with settings and values, the best first."""
    with connect() as client:
        sweep, trials = client.sweep(sweep_id), client.trials(sweep_id)
        newest = [] if as_json else list(client.runs(f"sweep:{sweep_id}"))
    if as_json:
        print_json([sweep, *trials])
        return
    from halfstep.cli.tables import field_table, print_tables, table

    best = "" if sweep["best"] is None else number_formats.number(sweep["best"])
    fields = {
        "Sweep": f"{sweep['id']}  {sweep['name']}",
        "Status": formats.label(sweep["status"]),
        "Reason": sweep["error"] or sweep["warning"],
        "Runs": f"{_count_ended(sweep)} / {sweep['runs_total']} ended",
        "Metric": f"{sweep['metric']}, {sweep['goal']}",
        "Best": best,
        "Recipe": sweep["recipe"],
        "Kind": sweep["kind"],
        "Pruner": (sweep["pruner"] or {}).get("kind", ""),
    }
    paths = list(dict.fromkeys(path for trial in trials for path in trial["params"]))
    columns = ("Run", "Status", sweep["metric"], *paths, *LIVE)
    runs = {run["id"]: run for run in newest}
    is_loss = sweep["metric"] == "loss"  # which is there as the value
    rows = [_trial_row(row, paths, runs.get(row["run_id"]), is_loss=is_loss) for row in trials]
    print_tables(field_table(fields), table(columns, rows))


def _trial_row(
    trial: "SweepTrial", paths: Sequence[str], run: "ListedRun | None", *, is_loss: bool
) -> tuple[str, ...]:
    live = [""] * len(LIVE)
    if run is not None:
        loss = "" if is_loss else formats.loss(run)
        skipped, left = formats.format_skipped(run), number_formats.duration(run["seconds_left"])
        scale, health = formats.run_scale(run), formats.health(run)
        live = [formats.progress(run), loss, scale, skipped, health, left]
    params = trial["params"]
    settings = [number_formats.setting(params[path]) if path in params else "–" for path in paths]
    value = number_formats.number(trial["value"])
    return str(trial["run_id"]), formats.label(trial["status"]), value, *settings, *live


@app.command()
def extend(
    sweep_id: SweepId,
    runs: Annotated[int | None, typer.Option(help="Number of runs to add")] = None,
    search: Search = None,
    as_json: AsJson = False,
) -> None:
    """Add runs to a sweep, or values to a grid: `sweep extend 1 --search training.seed=4..6`."""
    space = _space(search) or None
    with connect() as client:
        _print_sweep(client.extend_sweep(sweep_id, runs=runs, space=space), as_json=as_json)


@app.command()
def rank(
    sweep_id: SweepId,
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="A metric of its runs, or loss")],
    goal: Goal = "",
    as_json: AsJson = False,
) -> None:
    """Compare a sweep's runs by another metric, also those that have ended."""
    with connect() as client:
        _print_sweep(client.rank_sweep(sweep_id, metric, goal=goal), as_json=as_json)


@app.command()
def move(sweep_id: SweepId, project: OtherProject, as_json: AsJson = False) -> None:
    """Move a sweep and all of its runs to another project, if you maintain both."""
    with connect() as client:
        _print_sweep(client.move_sweep(sweep_id, project=project), as_json=as_json)


@app.command()
def pause(sweep_id: SweepId, as_json: AsJson = False) -> None:
    """Pause a sweep: it submits no more runs; runs under way continue."""
    with connect() as client:
        _print_sweep(client.pause_sweep(sweep_id), as_json=as_json)


@app.command()
def resume(sweep_id: SweepId, as_json: AsJson = False) -> None:
    """Resume a paused or failed sweep."""
    with connect() as client:
        _print_sweep(client.resume_sweep(sweep_id), as_json=as_json)


@app.command()
def retry(sweep_id: SweepId, as_json: AsJson = False) -> None:
    """Run the failed points of a sweep again, each as a new run."""
    with connect() as client:
        _print_sweep(client.retry_sweep(sweep_id), as_json=as_json)


@app.command()
def cancel(sweep_id: SweepId, as_json: AsJson = False) -> None:
    """Cancel a sweep, and its queued and training runs."""
    with connect() as client:
        _print_sweep(client.cancel_sweep(sweep_id), as_json=as_json)


def _space(search: Sequence[str] | None) -> dict[str, Any]:
    space = {}
    for path, text in pairs("--search", search or (), "FIELD=VALUES"):
        value = value_of(text)
        space[path] = value if isinstance(value, list) else text
    return space


def _count_ended(sweep: "SweepSummary") -> int:
    return int(sweep["complete"] + sweep["pruned"] + sweep["failed"])


def _print_sweep(sweep: "SweepDetail", *, as_json: bool) -> None:
    best = f"  best {sweep['metric']} {number_formats.number(sweep['best'])}"
    ended = f"{_count_ended(sweep)} / {sweep['runs_total']} runs ended"
    why = f"  ({sweep['error']})" if sweep["error"] else ""
    status = formats.label(sweep["status"])
    text = f"sweep {sweep['id']}  {status}  {sweep['name']}  {ended}"
    text += "" if sweep["best"] is None else best
    print_result(sweep, text + why, as_json=as_json)
    if sweep["warning"]:
        warn(f"{sweep['warning']} Rank by another: halfstep sweep rank {sweep['id']} METRIC")
