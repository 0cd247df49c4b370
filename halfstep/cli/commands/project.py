"""`halfstep projects COMMAND`."""

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.application import App, ListingGroup
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_list, print_result

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ProjectRow

ProjectName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the project")]

app = App("List projects; for admins: create, rename or delete one.", group=ListingGroup)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List visible projects with their usage."""
    with connect() as client:
        projects = client.projects()
    columns = ("Project", "Devices used", "Queued runs")
    print_list(projects, columns, _row, as_json=as_json)


@app.command()
def create(name: ProjectName, as_json: AsJson = False) -> None:
    """Create a project; for admins."""
    with connect() as client:
        project = client.make_project(name)
    print_result(project, f"the project {project['name']} is created", as_json=as_json)


@app.command()
def rename(
    name: ProjectName,
    new_name: Annotated[str, typer.Argument(metavar="NEW_NAME", help="The new name")],
    as_json: AsJson = False,
) -> None:
    """Rename a project; for admins."""
    with connect() as client:
        project = client.rename_project(name, new_name)
    print_result(project, f"the project {name} is now {project['name']}", as_json=as_json)


@app.command()
def delete(name: ProjectName, as_json: AsJson = False) -> None:
    """Delete a project without runs; for admins."""
    with connect() as client:
        client.delete_project(name)
    print_result({"name": name, "deleted": True}, f"{name} is deleted", as_json=as_json)


def _row(project: "ProjectRow") -> tuple[str, ...]:
    name = project["name"] or "Default project"
    return name, f"{project['devices_used']:,}", f"{project['queued_used']:,}"
