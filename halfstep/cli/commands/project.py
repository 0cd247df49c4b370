"""`halfstep projects COMMAND`."""

from typing import Annotated, Any

import typer

from halfstep.cli.application import App, ListingGroup
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_json, print_result

ProjectName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the project")]

app = App("List projects; for admins: rename or delete one.", group=ListingGroup)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the projects that you may see, with what they use."""
    from halfstep.client import Client

    with Client() as client:
        projects = client.projects()
    if as_json:
        print_json(projects)
        return
    from halfstep.cli.tables import print_table

    rows = [(_name(row), f"{row['devices_used']:,}", f"{row['queued_used']:,}") for row in projects]
    print_table(("Project", "Devices used", "Queued runs"), rows)


@app.command()
def rename(
    name: ProjectName,
    new_name: Annotated[str, typer.Argument(metavar="NEW_NAME", help="The new name")],
    as_json: AsJson = False,
) -> None:
    """Rename a project; for admins."""
    from halfstep.client import Client

    with Client() as client:
        project = client.rename_project(name, new_name)
    print_result(project, f"the project {name} is now {project['name']}", as_json=as_json)


@app.command()
def delete(name: ProjectName, as_json: AsJson = False) -> None:
    """Delete a project without runs; for admins."""
    from halfstep.client import Client

    with Client() as client:
        client.delete_project(name)
    print_result({"name": name, "deleted": True}, f"{name} is deleted", as_json=as_json)


def _name(project: dict[str, Any]) -> str:
    return str(project["name"] or "Default project")
