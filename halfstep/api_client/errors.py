"""The error of the API client."""

from collections.abc import Mapping
from typing import Any


class DamagedData(UserWarning):
    """A response lacks steps, points or files that are damaged on the server."""


class ApiError(Exception):
    """A request was rejected or got no response; the message is the reason.

    status: HTTP status, 0 without a response.  errors: a message for each invalid field.
    problem: the response's problem details (RFC 9457).  code: the reason, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        errors: Mapping[str, str] | None = None,
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.errors, self.problem = status, dict(errors or {}), dict(problem or {})
        self.code = str(self.problem.get("code", ""))
