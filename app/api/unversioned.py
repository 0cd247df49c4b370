"""Addresses from before the API had a version: they lead to those of the first."""

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse
from starlette.convertors import Convertor, register_url_convertor


class _Unversioned(Convertor[str]):
    """The rest of an address that names no version: an unknown one leads nowhere."""

    regex = r"(?!v\d+(?:/|$)).+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("unversioned", _Unversioned())
router = APIRouter(include_in_schema=False)


@router.api_route("/api/{_rest:unversioned}", methods=["GET", "POST", "PUT", "DELETE"])
def redirect(request: Request) -> RedirectResponse:
    """Send on with method and body; whoever asks signs in where it leads."""
    rest = request.scope["raw_path"].decode("ascii").removeprefix("/api")
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"/api/v1{rest}{query}", status_code=308)
