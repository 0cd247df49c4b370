"""`halfstep mcp`, by the official SDK's own client."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mcp import Client as Agent
from mcp import MCPError, StdioServerParameters

from db.database import Database
from db.tables import Run
from halfstep import Client
from halfstep.cli.mcp_server import server_of
from tests.halfstep.api_client.conftest import STEPS, client, recorded

pytestmark = pytest.mark.slow

__all__ = ["client", "recorded"]

READING = {"list_runs", "show_run", "findings", "series", "log", "compare", "recipes"}


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


def test_an_agent_talks_over_stdio(client: Client, address: str, token: str) -> None:
    """The command that agents start: it lists tools, and reads a run."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "halfstep.cli.main", "mcp"],
        env={**os.environ, "HALFSTEP_URL": address, "HALFSTEP_TOKEN": token},
    )

    async def talk(agent: Agent) -> tuple[Any, Any]:
        return await agent.list_tools(), await agent.call_tool("list_runs", {"limit": 5})

    listed, answered = ask(server, talk)
    assert {tool.name for tool in listed.tools} == READING
    assert all(tool.annotations.read_only_hint for tool in listed.tools)
    [run] = json.loads(answered.content[0].text)["runs"]
    assert (run["id"], run["recipe"]) == (1, "digits")


def test_what_is_read(client: Client, database: Database, recorded: Run) -> None:
    """Runs, findings, the series in few points, the log."""
    server = server_of(client)
    found = call(server, "list_runs", filter="digits status:active")
    assert [run["id"] for run in found["runs"]] == [1]
    assert call(server, "list_runs", filter="nobody's") == {"runs": []}
    assert call(server, "findings", run_id=1) == {"findings": client.findings(1)}
    assert call(server, "log", run_id=1, lines=3) == {"lines": client.log(1)[-3:]}
    assert [each["name"] for each in call(server, "recipes")["recipes"]] == ["digits"]
    shown = call(server, "show_run", run_id=1)
    assert shown["config"]["training"]["steps"] == 400
    result = call(server, "series", run_id=1, names=["loss", 'a "b",\u2028c'], points=32)
    assert set(result["series"]) == {"loss", 'a "b",\u2028c'}
    assert result["steps"] == STEPS
    assert len(result["series"]["loss"]["step"]) < STEPS
    assert result["nonfinite_losses"]["steps"] == [10]
    assert result["skipped"]["steps"] == [10]
    with pytest.raises(LookupError, match="There is no run 99"):
        call(server, "show_run", run_id=99)
    with pytest.raises(LookupError, match="points"):
        call(server, "series", run_id=1, points=5000)


def test_runs_are_compared(client: Client) -> None:
    """Only differing settings are returned."""
    client.submit("digits", {"training": {"steps": 9}}, name="other")
    laid_out = call(server_of(client), "compare", run_ids=[1, 2])
    assert [run["id"] for run in laid_out["runs"]] == [1, 2]
    assert laid_out["differences"] == {"training.steps": [400, 9]}
    assert laid_out["missing"] == []


def test_writing_has_to_be_allowed(client: Client) -> None:
    """Without the word there are no such tools."""
    with pytest.raises((LookupError, MCPError), match="submit"):
        call(server_of(client), "submit", recipe="digits")
    server = server_of(client, allow_writes=True)
    listed = ask(server, lambda agent: agent.list_tools())
    assert {tool.name for tool in listed.tools} == READING | {"submit", "fork"}
    queued = call(server, "submit", recipe="digits", config={"training": {"steps": 3}}, name="new")
    assert (queued["status"], queued["name"]) == ("queued", "new")
    with pytest.raises(LookupError, match="has no checkpoint"):
        call(server, "fork", run_id=1)
