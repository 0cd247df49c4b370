"""An agent that uses the official SDK's client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from mcp import Client as Agent
from mcp.types import ElicitResult

from halfstep.mcp.server import DATA

Person = Callable[[str], bool | str]


def ask(
    server: Any,
    talk: Callable[[Agent], Awaitable[Any]],
    person: Person | None = None,
    *,
    mode: str = "auto",
) -> Any:
    """Connect an agent to a server.

    person: the reply to the server's questions: True, False, "decline" or "cancel"; None: the
    client shows no questions.  mode: "legacy" for the protocol before 2026-07-28.
    """

    async def reply(_context: Any, asked: Any) -> ElicitResult:
        answer = person(asked.message) if person else "cancel"
        if isinstance(answer, str):
            return ElicitResult(action=answer)
        return ElicitResult(action="accept", content={"queue": answer})

    async def conversation() -> Any:
        callback = reply if person else None
        async with Agent(server, mode=mode, elicitation_callback=callback) as agent:
            return await talk(agent)

    return asyncio.run(conversation())


def call(
    server: Any, tool: str, person: Person | None = None, *, mode: str = "auto", **arguments: Any
) -> Any:
    """Call a tool; return the data of its result."""
    result = ask(server, lambda agent: agent.call_tool(tool, arguments), person, mode=mode)
    [content] = result.content
    if result.is_error:
        raise LookupError(content.text)
    return json.loads(content.text)[DATA]
