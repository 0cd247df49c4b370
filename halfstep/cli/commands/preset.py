"""`halfstep preset COMMAND`: saved configurations of runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import (
    AsJson,
    Fields,
    PrecisionOption,
    Preemptible,
    Project,
    Tags,
    configuration,
)
from halfstep.cli.output import print_list, print_result

if TYPE_CHECKING:
    from halfstep.api_client.response_types import PresetRow

app = App("List, save or remove presets of runs.")


@app.command("list")
def list_(
    project: Annotated[
        str | None, typer.Option(help="Only presets of this project; '' is the default project")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List presets of projects that you may submit to: `run submit --preset NAME` queues one."""
    with connect() as client:
        presets = client.presets(project=project)
    columns = ("Preset", "Name", "Recipe", "Project")
    print_list(presets, columns, _row, as_json=as_json)


def _row(preset: "PresetRow") -> tuple[str, ...]:
    return str(preset["id"]), preset["name"], preset["recipe"], preset["project"]


@app.command()
def save(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the preset")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe")],
    fields: Fields = None,
    precision: PrecisionOption = None,
    project: Project = None,
    tags: Tags = None,
    nodes: Annotated[int, typer.Option(help="Workers that train the run together")] = 1,
    devices: Annotated[int, typer.Option(help="Devices per node")] = 1,
    preemptible: Preemptible = False,
    as_json: AsJson = False,
) -> None:
    """Save a preset: `preset save quick digits --set training.steps=9`.

    It replaces the project's preset of the same name.
    """
    config = configuration(fields, precision)
    options: dict[str, object] = {} if project is None else {"project": project}
    options |= {"preemptible": True} if preemptible else {}
    with connect() as client:
        preset = client.save_preset(
            name,
            recipe,
            config,
            tags=tags or [],
            nodes=nodes,
            devices_per_node=devices,
            **options,
        )
    where = f" in {preset['project']}" if preset["project"] else ""
    text = f"preset {preset['id']}: {preset['name']}, {preset['recipe']}{where}"
    print_result(preset, text, as_json=as_json)


@app.command()
def remove(
    preset: Annotated[
        int, typer.Argument(metavar="PRESET", help="Number of the preset, from `preset list`")
    ],
    as_json: AsJson = False,
) -> None:
    """Delete a preset."""
    with connect() as client:
        client.delete_preset(preset)
    print_result({"id": preset, "removed": True}, f"removed preset {preset}", as_json=as_json)
