"""`halfstep login`: store a server's address and a token."""

import http
import sys
from getpass import getpass
from typing import Annotated

import typer

from halfstep.api_client import credentials, local_server
from halfstep.api_client.credentials import Credentials
from halfstep.api_client.errors import ApiError
from halfstep.cli.application import single
from halfstep.cli.options import AsJson, read_text
from halfstep.cli.output import print_notes, print_result


@single()
def app(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Address of the server; default: the one on this machine"
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a login although the server does not answer")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Store a server's URL and a token, in a file that only you can read."""
    url = url or local_server.default_url()
    if not credentials.is_address(url):
        raise typer.BadParameter(f"url is {url!r}; allowed: http://… or https://…")
    # Never an argument: the list of processes and the shell's history would show it.
    question = f"API token from the account page of {url}: "
    is_terminal = sys.stdin.isatty()
    token = (getpass(question) if is_terminal else read_text(sys.stdin.readline)).strip()
    if not token:
        raise typer.BadParameter("no token given: type it, or pass it on standard input")
    if wrong := credentials.flaw(token):
        raise typer.BadParameter(wrong)
    notes = _check_token(url, token)
    if notes and not force and credentials.place().exists():
        raise ApiError(0, f"{notes[0]}; the stored login stays: --force replaces it")
    path = credentials.store(Credentials(url.rstrip("/"), token))
    print_result(
        {"url": url, "path": str(path)}, f"The token for {url} is stored in {path}", as_json=as_json
    )
    print_notes(notes, as_json=as_json)


def _check_token(url: str, token: str) -> list[str]:
    """Send a request that any token permits; return why none could be sent.

    Raises ApiError if the token is unknown, or the server is not Halfstep.
    """
    from halfstep.api_client.responses import is_away
    from halfstep.client import Client

    try:
        with Client(url, token) as client:
            client.projects()
    except ApiError as error:
        is_outage = is_away(error) or error.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
        if not is_outage and error.status != http.HTTPStatus.FORBIDDEN:  # of a valid token
            raise
        return [f"the token was not checked: {error}"] if is_outage else []
    return []
