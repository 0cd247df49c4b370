"""`halfstep artifact COMMAND`: named, versioned artifacts."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.api_client.progress import Progress
from halfstep.cli import formats
from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson, SomeProject
from halfstep.cli.output import print_json, print_list, print_result
from halfstep.number_formats import size as size_text

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ArtifactSummary

Reference = Annotated[
    str,
    typer.Argument(
        metavar="ARTIFACT",
        help="NAME, NAME:v3, NAME:best or NAME@DIGEST, optionally after PROJECT/",
    ),
]
InProject = Annotated[
    str,
    typer.Option("--project", help="Project, unless ARTIFACT names it; default: Default project"),
]

app = App("List, show, get, put, alias or delete named artifacts.")


@app.command("list")
def list_(project: SomeProject = None, as_json: AsJson = False) -> None:
    """List artifacts, newest first."""
    with connect() as client:
        artifacts = list(client.named_artifacts(project))
    columns = ("Artifact", "Type", "Project", "Versions")
    print_list(artifacts, columns, _row, as_json=as_json)


def _row(artifact: "ArtifactSummary") -> tuple[str, ...]:
    project = artifact["project"] or "Default project"
    return artifact["name"], artifact["type"], project, str(artifact["versions"])


@app.command()
def show(artifact: Reference, project: InProject = "", as_json: AsJson = False) -> None:
    """Show a version with its files, and the artifact's other versions."""
    with connect() as client:
        version = client.artifact_version(artifact, project=project)
        versions = client.artifact_versions(artifact, project=project)["items"]
    if as_json:
        print_json([version])
        return
    from halfstep.cli.tables import field_table, print_tables, table

    def runs(role: str) -> str:
        return ", ".join(f"{run['name']} ({run['id']})" for run in version[role])  # type: ignore[literal-required]

    fields = {
        "Artifact": f"{version['artifact']['name']}:{version['version']}",
        "Type": version["artifact"]["type"],
        "Project": version["artifact"]["project"] or "Default project",
        "Aliases": ", ".join(version["aliases"]),
        "Digest": version["digest"],
        "Size": size_text(version["size_bytes"]),
        "Saved": formats.moment(version["created_at"]),
        "Made by": runs("made_by"),
        "Used by": runs("used_by"),
    }
    files = [(f["path"], size_text(f["size_bytes"]), f["sha256"][:12]) for f in version["entries"]]
    rows = [
        (
            v["version"],
            ", ".join(v["aliases"]),
            size_text(v["size_bytes"]),
            v["digest"][:12],
        )
        for v in versions
    ]
    print_tables(
        field_table(fields),
        table(("File", "Size", "SHA-256"), files),
        table(("Version", "Aliases", "Size", "Digest"), rows),
    )


@app.command()
def get(
    artifact: Reference,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="Folder to copy to; default: only download to the cache"
        ),
    ] = None,
    project: InProject = "",
    as_json: AsJson = False,
) -> None:
    """Download a version, verify it, and print its path."""
    with connect() as client, Progress(artifact, in_bytes=True) as progress:
        path = client.download_artifact(artifact, project=project, on_progress=progress)
    if folder is not None:
        path = _copy(path, folder)
    print_result({"path": str(path)}, str(path), as_json=as_json)


def _copy(path: Path, folder: Path) -> Path:
    """Copy a version out of the cache, whose files are read-only."""
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
        return folder
    return Path(shutil.copyfile(path, folder / path.name))


@app.command()
def put(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or folder to save")],
    name: Annotated[str, typer.Option(help="Name; default: name of the file or folder")] = "",
    type_: Annotated[str, typer.Option("--type", help="Type: dataset, model, …")] = "artifact",
    project: InProject = "",
    alias: Annotated[list[str] | None, typer.Option(help="Alias; repeatable")] = None,
    as_json: AsJson = False,
) -> None:
    """Save a file or folder as a version; unchanged content makes no new one."""
    name = name or path.absolute().name
    with connect() as client, Progress(str(path), in_bytes=True) as progress:
        saved = client.save_artifact(
            path,
            name=name,
            type=type_,
            project=project,
            aliases=alias or [],
            on_progress=progress,
        )
    print_result(saved, f"{name}:{saved['version']}", as_json=as_json)


@app.command()
def diff(
    before: Reference, after: Reference, project: InProject = "", as_json: AsJson = False
) -> None:
    """List the files that differ between two versions."""
    with connect() as client:
        changes = client.artifact_diff(before, after, project=project)["changes"]

    def size(size_bytes: int | None) -> str:
        return "" if size_bytes is None else size_text(size_bytes)

    print_list(
        changes,
        ("File", "Change", "Before", "After"),
        lambda c: (c["path"], c["kind"], size(c["size_before"]), size(c["size_after"])),
        as_json=as_json,
    )


@app.command()
def alias(
    artifact: Reference,
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias, such as best")],
    project: InProject = "",
    as_json: AsJson = False,
) -> None:
    """Give an alias to a version; another version loses it."""
    with connect() as client:
        version = client.set_alias(artifact, name, project=project)
    print_result(version, f"{artifact} is {', '.join(version['aliases'])}", as_json=as_json)


@app.command()
def delete(
    artifact: Reference,
    project: InProject = "",
    force: Annotated[
        bool, typer.Option("--force", help="Delete even if ended runs used it")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a version with its files."""
    with connect() as client:
        client.delete_artifact(artifact, project=project, force=force)
    print_result({"artifact": artifact, "deleted": True}, f"{artifact} is deleted", as_json=as_json)
