"""The `halfstep recipe` commands, registered as an entry point."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from halfstep.api_client.errors import ApiError
from halfstep.cli.application import App, Command
from halfstep.cli.options import AsJson, Fields, MaxError, MinCosine, PrecisionOption
from halfstep.cli.output import print_result
from trainer import registered_recipes
from trainer.registered_recipes import NotRegisteredError


class RecipeCommand(Command):
    """A command about recipes. They run a user's code: of its errors the traceback says more."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (NotRegisteredError, ApiError)
    has_file_errors = False

    def invoke(self, ctx: object) -> object:
        """Run the command with umask 077: its files are private, like a worker's."""
        before = os.umask(0o077)
        try:
            return super().invoke(ctx)
        finally:
            os.umask(before)


File = Annotated[
    str, typer.Argument(metavar="FILE", help="path/to/file.py or path/to/file.py:Class")
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name, path/to/file.py or path/to/file.py:Class")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; default: cuda if there is one")
]
CheckSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set a field for the check; repeatable"),
]

recipe = App("Check, plan, train and register your own recipes.", cls=RecipeCommand)


class TrainCommand(RecipeCommand):
    """`recipe train`, whose --help has the fields of the recipe that is named, or of all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; remember them for --help."""
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the options, then the fields that --set takes."""
        from trainer.console import fields_help  # loads torch, which takes seconds

        options, _rest, _order = self.make_parser(ctx).parse_args(list(ctx.meta["words"]))
        text = fields_help(options.get("name"))
        super().format_help(ctx, formatter)
        formatter.write(text)


@recipe.command()
def check(file: File, settings: CheckSettings = None, as_json: AsJson = False) -> None:
    """Run five steps in each precision on the CPU, and report mistakes."""
    from trainer.diagnosis.check import main  # loads torch, which takes seconds
    from trainer.registry import file_of

    reference = file if file_of(file) is None else _load(file)
    main(reference, settings or [], as_json=as_json)


@recipe.command(cls=TrainCommand)
def train(
    name: RecipeName,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Set one of the fields below; repeatable"
        ),
    ] = None,
    precision: PrecisionOption = None,
    device: Device = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where checkpoints and artifacts are saved"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Checkpoint to resume from")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe here, without server and database: `recipe train digits --precision fp16`.

    The exit code is 0 if it finished, 1 if its file cannot be loaded, 2 if something was typed
    wrongly, 3 if it failed, 5 if its loss is not finite or all its steps were skipped.
    """
    from trainer.console import train_recipe  # loads torch, which takes seconds

    train_recipe(
        name,
        settings or [],
        precision=precision,
        device=device,
        checkpoints=checkpoints,
        resume=resume,
        as_json=as_json,
    )


@recipe.command()
def plan(
    name: RecipeName,
    settings: Fields = None,
    run: Annotated[
        int | None,
        typer.Option(metavar="RUN", help="Also plan with up to three checkpoints of this run"),
    ] = None,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="FILE", help="Also plan with these; repeatable"),
    ] = None,
    no_fresh: Annotated[
        bool, typer.Option("--no-fresh", help="Plan with checkpoints only, not fresh weights")
    ] = False,
    batches: Annotated[int, typer.Option(min=1, max=16, help="Batches per set of weights")] = 2,
    max_error: MaxError = 0.1,
    min_cosine: MinCosine = 0.99,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Search the fastest mix of fp32, bf16 and fp16 whose gradients are close to those of fp32.

    Measures a recipe's first batches with fresh weights, and with those of checkpoints. Nothing is
    trained.
    """
    if run is not None and checkpoints:
        raise typer.BadParameter(f"--run {run} uses the run's own checkpoints; omit --checkpoint")
    from halfstep.precision_lab.plan_measurement import Bounds
    from trainer.diagnosis.precision_plan import main  # loads torch, which takes seconds

    main(
        name,
        settings or [],
        device=device,
        run=run,
        checkpoints=checkpoints or [],
        with_fresh=not no_fresh,
        batches=batches,
        bounds=Bounds(max_error, min_cosine),
        as_json=as_json,
    )


@recipe.command()
def add(
    file: File,
    settings: CheckSettings = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Only check that it can be loaded")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a recipe, and register it with the workers of this data folder if it has no errors."""
    if no_check and settings:
        text = f"--set {settings[0]} is only for the check, which --no-check disables"
        raise typer.BadParameter(text)
    reference = _load(file)
    registered_recipes.look_for_folder()
    if no_check:
        _register(reference, as_json=as_json)
        return
    from trainer.diagnosis import check  # loads torch, which takes seconds

    _, report = check.check_and_print(reference, settings or [], as_json=as_json)
    if not report.errors:
        _register(reference, as_json=as_json)
    check.note(reference, report)
    if report.errors:
        count = f"{len(report.errors)} error{'s' * (len(report.errors) > 1)}"
        text = f"{reference} is not added: the check found {count}; --no-check adds it all the same"
        raise NotRegisteredError(text)


@recipe.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the registered recipes, with the result of each one's check."""
    for registered in registered_recipes.read():
        reference = registered["reference"]
        is_there = Path(reference.rpartition(":")[0]).is_file()
        check = registered_recipes.check_of(reference) if is_there else None
        text = f"{reference}  {_state(reference, check) if is_there else 'there is no such file'}"
        result = {"reference": reference, "is_there": is_there, "check": check}
        print_result(result, text, as_json=as_json)
    if not as_json:
        typer.echo(f"kept in {registered_recipes.path()}")


@recipe.command()
def remove(
    file: File,
    as_json: AsJson = False,
) -> None:
    """Unregister a recipe; its file and its runs stay."""
    for reference in registered_recipes.remove(file):
        print_result({"removed": reference}, f"{reference} is kept no longer.", as_json=as_json)


def _load(file: str) -> str:
    """Return a recipe's reference with its full path and class. Raises NotRegisteredError."""
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
    if offered.error:
        place = f"{offered.place}: " if offered.place else ""
        raise NotRegisteredError(f"{path} cannot be offered: {place}{offered.error}")
    return f"{path}:{load_recipe(reference).__name__}"


def _register(reference: str, *, as_json: bool) -> None:
    """Register a recipe, and print the name under which workers offer it."""
    from trainer.probe import recipes  # loads torch, which takes seconds
    from trainer.registry import load_recipe

    registered_recipes.add(reference)
    names = {recipe.reference: recipe.name for recipe in recipes()}
    name, declared = names[reference], load_recipe(reference).name
    holder = next((other for other, taken in names.items() if taken == declared != name), None)
    result = {"reference": reference, "kept_in": str(registered_recipes.path()), "name": name}
    folder = registered_recipes.path().parent
    text = f"{reference} is registered: workers of {folder} offer it soon, as {name}."
    if holder:
        whose = "a built-in recipe" if holder == declared else holder
        text += f" The name {declared} is that of {whose}: submit it by its path, or rename it."
    print_result(result | {"name_taken_by": holder}, text, as_json=as_json)


def _state(reference: str, check: dict[str, Any] | None) -> str:
    if check is None:
        return f"not checked: halfstep recipe check {reference}"
    errors = sum(finding["severity"] == "error" for finding in check["findings"])
    warnings = len(check["findings"]) - errors + check["left_out"]
    since = ", before the file was changed" if check["is_outdated"] else ""
    return f"{errors} errors and {warnings} warnings{since}"
