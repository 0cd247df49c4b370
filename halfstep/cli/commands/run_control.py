"""`halfstep run cancel, pause, resume, fork, edit, delete, …`: commands that change runs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.api_client.errors import ApiError
from halfstep.cli import formats
from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import (
    AsJson,
    Fields,
    Name,
    OtherProject,
    PrecisionOption,
    Project,
    RunId,
    RunIds,
    Tags,
    Wait,
    configuration,
    note_text,
)
from halfstep.cli.output import print_result, warn
from halfstep.number_formats import power_of_two
from halfstep.number_formats import scale as scale_text

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunSummary
    from halfstep.client import Client


def add_to(app: App) -> None:
    """Add the commands to the group `run`."""
    for command in (cancel, pause, resume, scale, fork, continue_, edit, delete, restore, move):
        app.command(command.__name__.rstrip("_"))(command)


def report_queued(client: "Client", run: "RunSummary", *, wait: bool, as_json: bool) -> None:
    """Print a run that was queued; wait for its end if asked to, and exit with its code."""
    print_result(run, formats.run_line(run), as_json=as_json)
    if wait:
        from halfstep.cli.live import wait_for_run

        raise typer.Exit(wait_for_run(client, run["id"], as_json=as_json))


def _act(action: "Callable[[Client], RunSummary]", *, as_json: bool) -> None:
    """Apply an action to a run, and print the run."""
    with connect() as client:
        run = action(client)
    print_result(run, formats.run_line(run), as_json=as_json)


def cancel(run_id: RunId, as_json: AsJson = False) -> None:
    """Cancel a run; a training run saves a checkpoint first."""
    _act(lambda client: client.cancel(run_id), as_json=as_json)


def pause(run_id: RunId, as_json: AsJson = False) -> None:
    """Pause a run, with a checkpoint; `run resume` queues it again."""
    _act(lambda client: client.pause(run_id), as_json=as_json)


def resume(run_id: RunId, as_json: AsJson = False) -> None:
    """Resume a paused run from its last checkpoint."""
    _act(lambda client: client.resume(run_id), as_json=as_json)


def continue_(run_id: RunId, as_json: AsJson = False) -> None:
    """Continue a cancelled or failed run from its last checkpoint, as a new run."""
    _act(lambda client: client.continue_run(run_id), as_json=as_json)


def _read_scale(text: str) -> float:
    try:
        return power_of_two(text) or float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; allowed: 65536, 2^16") from None


def scale(
    run_id: RunId,
    loss_scale: Annotated[
        float, typer.Argument(metavar="SCALE", help="The new loss scale", parser=_read_scale)
    ],
    as_json: AsJson = False,
) -> None:
    """Set the loss scale of a running fp16 run from its next step on."""
    with connect() as client:
        request = client.set_scale(run_id, loss_scale)
    print_result(
        request,
        f"run {run_id}: requested the loss scale {scale_text(loss_scale)}",
        as_json=as_json,
    )


def fork(
    run_id: RunId,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; default: the newest")
    ] = None,
    fields: Fields = None,
    precision: PrecisionOption = None,
    name: Name = "",
    tags: Tags = None,
    project: Project = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Queue a run that starts from another's checkpoint: `fork 1 --set training.steps=800`.

    With --wait, the exit code is as of `run follow`.
    """
    config = configuration(fields, precision)
    options: dict[str, Any] = {"name": name, "tags": tags or []}
    options |= {} if project is None else {"project": project}
    with connect() as client:
        try:
            queued = client.fork(run_id, config, step=step, **options)
        except ApiError as error:
            if "training.steps" not in error.errors:
                raise
            raise ApiError(error.status, f"{error}; pass --set training.steps=STEPS") from None
        report_queued(client, queued, wait=wait, as_json=as_json)


def edit(
    run_id: RunId,
    name: Annotated[str | None, typer.Option(help="New name")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="Replace the tags with this one; repeatable")
    ] = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Remove all tags")] = False,
    note: Annotated[
        str | None, typer.Option(help="New note, in Markdown; - reads it from stdin")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change a run's name, tags or note: `edit 1 --name baseline --tag lr --note 'too slow'`."""
    new_tags = [] if no_tags else tags
    if name is None and new_tags is None and note is None:
        raise typer.BadParameter("use at least one of --name, --tag, --no-tags and --note")
    text = note_text(note)
    _act(lambda client: client.edit(run_id, name=name, tags=new_tags, note=text), as_json=as_json)


def delete(run_ids: RunIds, as_json: AsJson = False) -> None:
    """Move ended runs to the trash, from where `restore` takes them for some days.

    The exit code is 1 if one was refused.
    """
    _bulk("delete", run_ids, "is in the trash", as_json=as_json)


def restore(run_ids: RunIds, as_json: AsJson = False) -> None:
    """Restore runs from the trash; the exit code is 1 if one was refused."""
    _bulk("restore", run_ids, "is restored", as_json=as_json)


def move(run_ids: RunIds, project: OtherProject, as_json: AsJson = False) -> None:
    """Move runs to another project, if you maintain both: `move 3 --project vision`.

    The exit code is 1 if one was refused.
    """
    _bulk("move", run_ids, "is moved", project=project, as_json=as_json)


def _bulk(
    action: str, run_ids: list[int], outcome: str, *, as_json: bool, project: str | None = None
) -> None:
    with connect() as client:
        result = client.bulk(action, run_ids, project=project)
    lines = [f"run {run_id} {outcome}" for run_id in result["done"]]
    print_result(result, "\n".join(lines), as_json=as_json)
    for failure in result["refused"]:
        if not as_json:
            warn(failure["detail"])
    raise typer.Exit(int(bool(result["refused"])))
