"""`halfstep mcp`: a server's runs for agents."""

import sys
from typing import Annotated

import typer

from halfstep.cli.application import single


@single()
def app(
    allow_writes: Annotated[
        bool,
        typer.Option(
            "--allow-writes", help="Also offer tools that queue runs, if the token allows it"
        ),
    ] = False,
) -> None:
    """Serve a server's runs to agents, by the Model Context Protocol over stdio."""
    try:
        from halfstep.mcp import server
    except ModuleNotFoundError as error:
        sys.exit(f"halfstep: {error.name} is required: pip install 'halfstep[mcp]'")
    server.serve(allow_writes=allow_writes)
