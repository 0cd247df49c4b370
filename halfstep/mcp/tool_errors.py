"""Errors of the API as errors of a tool."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from mcp.server.mcpserver.exceptions import ToolError

from halfstep.api_client.errors import ApiError

P = ParamSpec("P")
Result = TypeVar("Result")


def tool_errors(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return the function with API errors converted to tool errors."""

    @wraps(function)
    def wrapper(*arguments: P.args, **named: P.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except ApiError as error:
            raise ToolError(str(error)) from error

    return wrapper
