"""`halfstep report COMMAND`: pages of Markdown with panels of runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson, SomeProject, note_text
from halfstep.cli.output import print_list, print_result

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ReportRow

app = App("List, show or create reports.")


@app.command("list")
def list_(project: SomeProject = None, as_json: AsJson = False) -> None:
    """List the reports of projects that you see, newest first."""
    with connect() as client:
        reports = list(client.reports(project=project))
    columns = ("Report", "Title", "Project", "Author")
    print_list(reports, columns, _row, as_json=as_json)


def _row(report: "ReportRow") -> tuple[str, ...]:
    return str(report["id"]), report["title"], report["project"], report["author"]


@app.command()
def show(
    report_id: Annotated[int, typer.Argument(metavar="REPORT", help="ID of the report")],
    as_json: AsJson = False,
) -> None:
    """Print the Markdown of a report."""
    with connect() as client:
        report = client.report(report_id)
    print_result(dict(report), f"# {report['title']}\n\n{report['text']}", as_json=as_json)


@app.command()
def create(
    title: Annotated[str, typer.Argument(metavar="TITLE", help="Title of the report")],
    text: Annotated[str, typer.Option(help="Markdown; - reads it from stdin")] = "",
    project: SomeProject = None,
    as_json: AsJson = False,
) -> None:
    """Create a report: `report create 'Precisions' --text - < precisions.md`."""
    with connect() as client:
        report = client.create_report(title, note_text(text) or "", project=project or "")
    print_result(dict(report), f"created report {report['id']}", as_json=as_json)
