"""`halfstep note COMMAND`: the note on a project or a comparison."""

from typing import Annotated

import typer

from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson, SomeProject, note_text
from halfstep.cli.output import print_result

NotedRuns = Annotated[
    list[int] | None, typer.Argument(metavar="RUN", help="Compared runs, in any order")
]

app = App("Show or write the note on a project or a comparison.")


@app.command()
def show(run_ids: NotedRuns = None, project: SomeProject = None, as_json: AsJson = False) -> None:
    """Print the note on a project, or on runs side by side: `note show 1 3`."""
    _check_subject(run_ids, project)
    with connect() as client:
        text = client.note(*(run_ids or ()), project=project)
    print_result({"note": text}, text, as_json=as_json)


@app.command()
def write(
    note: Annotated[
        str, typer.Option(help="Markdown; - reads it from stdin; empty removes the note")
    ],
    run_ids: NotedRuns = None,
    project: SomeProject = None,
    as_json: AsJson = False,
) -> None:
    """Write the note on a project, or on runs side by side: `note write 1 3 --note 'too slow'`."""
    _check_subject(run_ids, project)
    new = note_text(note) or ""
    with connect() as client:
        text = client.write_note(new, *(run_ids or ()), project=project)
    print_result({"note": text}, "saved the note" if text else "removed the note", as_json=as_json)


def _check_subject(run_ids: list[int] | None, project: str | None) -> None:
    if bool(run_ids) == (project is not None):
        raise typer.BadParameter("use either runs or --project")
