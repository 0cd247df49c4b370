"""The error of the API client."""

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """The server refused, or does not answer; the message says why.

    status: of the answer, 0 where there was none.  errors: a sentence a field, if fields are wrong.
    problem: all that the answer said.  code: the reason, for programs.
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
