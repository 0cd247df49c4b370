"""An agent, by the official SDK's own client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from mcp import Client as Agent


def ask(server: Any, talk: Callable[[Agent], Awaitable[Any]]) -> Any:
    """Let an agent talk to a server."""

    async def conversation() -> Any:
        async with Agent(server) as agent:
            return await talk(agent)

    return asyncio.run(conversation())


def call(server: Any, tool: str, **arguments: Any) -> Any:
    """Call a tool; return its result, parsed if it is JSON."""
    result = ask(server, lambda agent: agent.call_tool(tool, arguments))
    [content] = result.content
    if result.is_error:
        raise LookupError(content.text)
    return json.loads(content.text)
