"""What a person types about recipes: joins the `halfstep` command by its entry points."""

from typing import Annotated

import typer

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def recipe(words: list[str]) -> None:
    """Look at a recipe of your own before it trains for hours: `recipe check FILE`."""
    cli(words, prog_name="halfstep recipe")


@cli.callback()
def _group() -> None:
    """Recipes of your own."""


@cli.command()
def check(
    file: Annotated[str, typer.Argument(help="path/to/file.py or path/to/file.py:Class")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="may be repeated")
    ] = None,
) -> None:
    """Run five steps in each precision, and say in words what is wrong."""
    from trainer.diagnosis.check import main  # loads torch, which takes seconds

    options = [word for assignment in settings or () for word in ("--set", assignment)]
    main([file, *options])
