"""`halfstep run COMMAND`: submit, list, show and follow runs; logs and checkpoints."""

import http
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep import number_formats
from halfstep.api_client.errors import ApiError
from halfstep.cli import formats
from halfstep.cli.application import App
from halfstep.cli.commands import reproduce, run_control, run_data
from halfstep.cli.connection import connect
from halfstep.cli.options import (
    AsJson,
    Commit,
    Fields,
    Folder,
    Git,
    Line,
    Name,
    Parameters,
    PrecisionOption,
    Preemptible,
    Project,
    RunId,
    Secrets,
    Tags,
    Variables,
    Venv,
    Wait,
    check_folder,
    command_of,
    configuration,
)
from halfstep.cli.output import print_json, print_notes, print_result, warn
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunDetail
    from halfstep.client import Client

app = App("Submit, list, show, follow, edit, pause, cancel, delete and fork runs.")


@app.command()
def submit(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe, unless --command or --preset is given")
    ] = "",
    fields: Fields = None,
    precision: PrecisionOption = None,
    name: Name = "",
    tags: Tags = None,
    project: Project = None,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Preset to start from instead of a recipe")
    ] = "",
    nodes: Annotated[
        int | None, typer.Option(help="Workers that train the run together; default: 1")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Devices per node; default: 1")] = None,
    preemptible: Preemptible = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Initial weights to upload: .safetensors or .pt"),
    ] = None,
    line: Line = "",
    parameters: Parameters = None,
    folder: Folder = "",
    git: Git = "",
    commit: Commit = "",
    venv: Venv = "",
    variables: Variables = None,
    secrets: Secrets = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Queue a run: `submit digits --set training.steps=400`.

    Or a command line: `submit --command 'python train.py --lr {lr}' --param lr=0.1`.

    With --wait, the exit code is 0 if it finished, 3 if it failed, 4 if it was cancelled, 5 if it
    finished with a loss that is not finite, or with all its steps skipped.
    """
    if sum(map(bool, (recipe, line, preset))) != 1:
        raise typer.BadParameter("use exactly one of a recipe, --preset and --command")
    if weights and (line or not weights.is_file()):
        raise typer.BadParameter(f"--weights is {weights}; allowed: a file, and only with a recipe")
    options: dict[str, Any] = {"name": name} | ({"tags": tags} if tags else {})
    given = {"nodes": nodes, "devices_per_node": devices, "project": project}
    options |= {option: value for option, value in given.items() if value is not None}
    options |= {"preemptible": True} if preemptible else {}
    command = (
        command_of(line, parameters, folder, git, commit, venv, variables, secrets) if line else {}
    )
    with connect() as client:
        if line:
            queued = client.submit_command(**command, **options)
        else:
            config = configuration(fields, precision)
            if weights:
                config = _with_uploaded_weights(client, config, weights)
            queued = (
                client.submit_preset(preset, config, **options)
                if preset
                else client.submit(recipe, config, **options)
            )
        run_control.report_queued(client, queued, wait=wait, as_json=as_json)


def _with_uploaded_weights(client: "Client", config: JsonObject, path: Path) -> dict[str, Any]:
    from halfstep.api_client.progress import Progress
    from halfstep.session.nesting import merge

    with Progress(path.name, in_bytes=True) as progress:
        upload = client.upload_weights(path, on_progress=progress)["upload"]
    return merge(config, {"weights": {"upload": upload}})


def _no_option(value: str) -> str:
    if value.startswith("--"):  # `--sort --limit 5`
        raise typer.BadParameter(f"{value!r} is not valid; allowed: a column, setting or metric")
    return value


@app.command("list")
def list_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILTER",
            help="Conditions: a text, status:failed, since:7d, 'lr>0.01', 'val/accuracy>0.9'; "
            "after --, -word excludes",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            callback=_no_option, help='Column, setting or metric to sort by; "-loss": descending'
        ),
    ] = "-id",
    limit: Annotated[int, typer.Option(help="Maximum number of runs")] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with connect() as client:
        page = client.run_page(" ".join(words or ()), sort=sort, limit=limit)
    notes = page["notes"]
    if as_json:
        print_json(page["runs"])
    elif page["runs"]:
        from halfstep.cli.tables import print_tables, run_table

        print_tables(run_table(page["runs"], "Reason"))
    else:
        notes = [*notes, "no run matches"]
    if len(page["runs"]) < page["total"]:
        notes = [*notes, f"{len(page['runs']):,} of {page['total']:,} runs; --limit shows more"]
    print_notes(notes, as_json=as_json)


@app.command()
def show(run_id: RunId, as_json: AsJson = False) -> None:
    """Show a run: its state, changed settings and findings; --json has all of it."""
    with connect() as client:
        run, findings = client.run(run_id), client.findings(run_id)
        address = client.page_url(run_id)
        try:
            damage = client.damage(run_id)
        except ApiError as error:  # of a server that does not look for damage yet
            if error.status != 404:
                raise
            damage = {"damage": [], "text": ""}
    if as_json:
        print_json([{**run, "findings": findings, "damage": damage["damage"]}])
        return
    if damage["text"]:
        warn(damage["text"])
    from halfstep.cli.tables import field_table, print_tables, table

    tables = [field_table(_fields_of(run, address))]
    settings = {
        row["path"]: number_formats.setting(row["value"]) for row in run["changed_settings"]
    }
    if settings:
        tables.append(field_table(settings, title="Changed settings"))
    if findings:
        rows = [(finding["title"], finding["text"]) for finding in findings]
        tables.append(table(("Finding", "Text"), rows))
    print_tables(*tables)


def _fields_of(run: "RunDetail", address: str) -> dict[str, str]:
    health = run["health"]
    recipe = run["recipe"] or run["source"]
    left = run["seconds_left"]
    return {
        "Run": f"{run['id']}  {run['name']}",
        "Status": formats.state(run),
        "Reason": formats.reason(run),
        "Step": formats.progress(run),
        "Loss": formats.loss(run),
        "Scale": formats.run_scale(run),
        "Skipped": formats.format_skipped(run),
        "Health": formats.health(run),
        "Health reason": health["reason"] if health else "",
        "ETA": "" if left is None else number_formats.duration(left),
        "Steps/s": number_formats.number(run["steps_per_second"]),
        "Duration": number_formats.duration(run["seconds"]),
        "Recipe": "  ".join(filter(None, (recipe, run["precision"]))),
        "Owner": run["owner"],
        "Project": run["project"],
        "Tags": ", ".join(run["tags"]),
        "Created": formats.moment(run["created_at"]),
        "Note": run["note"],
        "Page": address,
    }


@app.command()
def follow(run_id: RunId, as_json: AsJson = False) -> None:
    """Follow a run until it ends; the exit code reports the outcome.

    The exit code is 0 if it finished, 3 if it failed, 4 if it was cancelled, 5 if it finished with
    a loss that is not finite, or with all its steps skipped.
    """
    from halfstep.cli.live import follow_run

    with connect() as client:
        raise typer.Exit(follow_run(client, run_id, as_json=as_json))


@app.command("open")
def open_(run_id: RunId, as_json: AsJson = False) -> None:
    """Open the page of a run in a browser, and print its link."""
    import webbrowser

    with connect() as client:
        client.run(run_id)  # reports that there is none, instead of opening an error page
        address = client.page_url(run_id)
    print_result({"url": address}, address, as_json=as_json)
    webbrowser.open(address)


@app.command()
def log(run_id: RunId, as_json: AsJson = False) -> None:
    """Print a run's log: once it has ended, the whole log."""
    with connect() as client:
        if not as_json and _print_log_file(client, run_id):
            return
        for line in client.log(run_id):
            print(json.dumps(line) if as_json else line["text"])


def _print_log_file(client: "Client", run_id: int) -> bool:
    """Print the files of an ended run's log; return whether there are any."""
    if client.run(run_id)["ended_at"] is None:
        return False
    try:
        for piece in client.log_text(run_id):
            sys.stdout.buffer.write(piece)
    except ApiError as error:
        if error.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.FORBIDDEN):
            return False  # users who may not download files get the lines that the page shows
        raise
    return True


@app.command()
def download(
    run_id: RunId,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to save the file")
    ] = Path(),
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; default: the newest")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="checkpoint (default), weights, ema or weights.MODULE")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint of a run, and verify its SHA-256."""
    check_folder(folder)
    from halfstep.api_client.progress import Progress

    with connect() as client, Progress(f"run {run_id}", in_bytes=True) as progress:
        path = client.download(run_id, folder, step=step, kind=kind, on_progress=progress)
    print_result({"path": str(path)}, str(path), as_json=as_json)


run_data.add_to(app)
run_control.add_to(app)
reproduce.add_to(app)
