"""Confirmation of a change by the person who uses the agent.

The agent has read names and logs that others wrote, so its own argument confirms nothing: the
client shows the question to the person (elicitation of the Model Context Protocol).
"""

import json
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlencode

from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit
from pydantic import BaseModel, Field

from halfstep.client import Client
from halfstep.session.nesting import flat
from halfstep.telemetry.plain_json import JsonObject

#: Longest question: a person must be able to read what is queued.
MOST_CHARACTERS = 4000


class Answer(BaseModel):
    """The person's answer."""

    queue: Annotated[bool, Field(title="Queue this run", description="No, queue nothing")]


Confirmation: TypeAlias = ElicitationResult[Answer]


def question(context: "Context[Any, Any]", run: JsonObject, page: str) -> Elicit[Answer]:
    """Return the question that the client shows to the person. Raises ToolError.

    run: what would be queued.  page: address at which the person can queue it without the agent.
    """
    elsewhere = f"Nothing was queued. The user can queue it on this page: {page}"
    capabilities = context.client_capabilities
    elicitation = capabilities.elicitation if capabilities is not None else None
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        raise ToolError(
            f"This client cannot ask the user to confirm (it lacks the capability elicitation). "
            f"{elsewhere}"
        )
    # JSON in ASCII: a name cannot hide characters, nor look like a further line of the question.
    shown = "\n".join(f"{name}: {json.dumps(value)}" for name, value in run.items())
    if len(shown) > MOST_CHARACTERS:
        raise ToolError(f"The settings are too long to show to the user. {elsewhere}")
    return Elicit(f"An agent wants to queue a run.\n{shown}", Answer)


def check(confirmation: Confirmation) -> None:
    """Check that the person agreed. Raises ToolError."""
    if not isinstance(confirmation, AcceptedElicitation) or not confirmation.data.queue:
        raise ToolError("The user did not confirm. Nothing was queued.")


def form(client: Client, config: JsonObject | None = None, **query: object) -> str:
    """Return the address of the form of a new run, prefilled with settings."""
    given = [(name.rstrip("_"), value) for name, value in query.items() if value is not None]
    given += [("set", f"{path}={json.dumps(value)}") for path, value in flat(config or {}).items()]
    return client.url_of(f"/runs/new?{urlencode(given)}")
