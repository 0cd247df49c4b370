"""What commands of the service have in common, which typer reads: it is installed with them."""

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line, for machines")]


def run_typed(cli: typer.Typer, words: list[str], name: str) -> None:
    """Run what was typed after a command's name, and exit with its code.

    With --json, what was typed wrongly is told as JSON too.
    """
    if "--json" not in words:
        cli(words, prog_name=f"halfstep {name}")
        return
    try:
        code = cli(words, prog_name=f"halfstep {name}", standalone_mode=False)
    except typer.TyperException as error:
        sys.stderr.write(json.dumps({"error": error.format_message()}) + "\n")
        sys.exit(error.exit_code)
    sys.exit(code)


def tell(told: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print what a command has to tell, as a JSON object or in words."""
    if as_json or text:
        typer.echo(json.dumps(told) if as_json else text)
