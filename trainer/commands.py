"""The `halfstep recipe` commands, registered as an entry point."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from halfstep.cli.application import App, Command
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_result
from trainer import registered_recipes
from trainer.registered_recipes import NotRegisteredError


class RecipeCommand(Command):
    """A command about recipes. They run a user's code: of its errors the traceback says more."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (NotRegisteredError,)
    has_file_errors = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it writes only its user can read, like what workers write."""
        os.umask(0o077)
        return super().invoke(ctx)


recipe = App("Check, train and register recipes of your own.", cls=RecipeCommand)


@recipe.command()
def check(
    file: Annotated[str, typer.Argument(help="path/to/file.py or path/to/file.py:Class")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="may be repeated")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run five steps in each precision, and say in words what is wrong."""
    from trainer.diagnosis.check import main  # loads torch, which takes seconds
    from trainer.registry import file_of

    reference = file if file_of(file) is None else _loaded(file)
    main(_words(reference, settings or [], as_json=as_json))


@recipe.command(
    add_help_option=False,  # the recipe's own help has its fields
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def train(context: typer.Context) -> None:
    """Train a recipe here and now: `recipe train mine.py`, `recipe train digits --help`."""
    from trainer.console import main  # loads torch, which takes seconds

    main(context.args)


@recipe.command()
def add(
    file: Annotated[str, typer.Argument(help="path/to/file.py or path/to/file.py:Class")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="for the check; may be repeated"),
    ] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="only see that it loads")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe, and have the workers of this data folder offer it if it has no errors."""
    if no_check and settings:
        text = f"--set {settings[0]} is for the check, which --no-check leaves out: leave out one"
        raise typer.BadParameter(text)
    reference = _loaded(file)
    registered_recipes.look_for_folder()
    if no_check:
        _keep(reference, as_json=as_json)
        return
    from trainer.diagnosis import check  # loads torch, which takes seconds

    _, report = check.tell(_words(reference, settings or [], as_json=as_json))
    if not report.errors:
        _keep(reference, as_json=as_json)
    check.note(reference, report)
    if report.errors:
        count = f"{len(report.errors)} error{'s' * (len(report.errors) > 1)}"
        text = f"{reference} is not added: the check found {count}; --no-check adds it all the same"
        raise NotRegisteredError(text)


@recipe.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the recipes that are kept, with what the check said of each."""
    for each in registered_recipes.read():
        reference = each["reference"]
        is_there = Path(reference.rpartition(":")[0]).is_file()
        check = registered_recipes.check_of(reference) if is_there else None
        text = f"{reference}  {_state(reference, check) if is_there else 'there is no such file'}"
        told = {"reference": reference, "is_there": is_there, "check": check}
        print_result(told, text, as_json=as_json)
    if not as_json:
        typer.echo(f"kept in {registered_recipes.path()}")


@recipe.command()
def remove(
    file: Annotated[str, typer.Argument(help="path/to/file.py or path/to/file.py:Class")],
    as_json: AsJson = False,
) -> None:
    """Have workers offer a recipe no longer; the file stays, and so do its runs."""
    for reference in registered_recipes.remove(file):
        print_result({"removed": reference}, f"{reference} is kept no longer.", as_json=as_json)


def _loaded(file: str) -> str:
    """Return a recipe's reference, with its whole path and its class. Raises NotKeptError."""
    from trainer.probe import offer  # loads torch, which takes seconds
    from trainer.registry import file_of, load_recipe

    path = file_of(str(Path(file).expanduser()))
    if path is None:
        text = f"{file} is no file of Python; allowed: path/to/file.py or path/to/file.py:Class"
        raise NotRegisteredError(text)
    if not path.is_file():
        raise NotRegisteredError(f"there is no file {path}")
    reference = str(path) if file.endswith(".py") else f"{path}:{file.rpartition(':')[2]}"
    offered = offer(reference)
    if "error" in offered:
        place = f"{offered['place']}: " if offered["place"] else ""
        raise NotRegisteredError(f"{path} cannot be offered: {place}{offered['error']}")
    return f"{path}:{load_recipe(reference).__name__}"


def _words(reference: str, settings: list[str], *, as_json: bool) -> list[str]:
    """Return what the check takes."""
    options = [word for assignment in settings for word in ("--set", assignment)]
    return [reference, *options, *["--json"] * as_json]


def _keep(reference: str, *, as_json: bool) -> None:
    """Keep a recipe, and tell by which name workers offer it."""
    from trainer.probe import recipes  # loads torch, which takes seconds
    from trainer.registry import load_recipe

    registered_recipes.add(reference)
    names = {each["reference"]: each["name"] for each in recipes()}
    name, declared = names[reference], load_recipe(reference).name
    holder = next((other for other, each in names.items() if each == declared != name), None)
    told = {"reference": reference, "kept_in": str(registered_recipes.path()), "name": name}
    folder = registered_recipes.path().parent
    text = f"{reference} is kept: workers of {folder} offer it soon, as {name}."
    if holder:
        whose = "a recipe that comes along" if holder == declared else holder
        text += f" The name {declared} is that of {whose}: submit it by its path, or call it else."
    print_result(told | {"name_taken_by": holder}, text, as_json=as_json)


def _state(reference: str, check: dict[str, Any] | None) -> str:
    if check is None:
        return f"not checked: halfstep recipe check {reference}"
    errors = sum(each["severity"] == "error" for each in check["findings"])
    warnings = len(check["findings"]) - errors + check["left_out"]
    since = ", before the file was changed" if check["is_outdated"] else ""
    return f"{errors} errors and {warnings} warnings{since}"
