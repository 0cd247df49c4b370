"""API reference: as OpenAPI for tools, and as a page without resources from a CDN."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.html.rendering import page
from app.http.credentials import cookie_name
from app.http.http_errors import PROBLEM_TYPE, Problem
from app.http.path_prefix import public_address

router = Router(include_in_schema=False)


@router.get("/openapi.json", SIGNED_IN)
def openapi(request: Request) -> dict[str, Any]:
    """Return the OpenAPI description."""
    return describe(request.app)


@router.get("/docs", SIGNED_IN)
def docs(request: Request, principal: SignedIn) -> HTMLResponse:
    """Show the API reference."""
    description = describe(request.app)
    by_tag: dict[str, list[dict[str, Any]]] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            entry = {"path": path, "method": method.upper(), "shapes": _shapes(operation)}
            entry |= operation
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(entry)
    schemas = description["components"]["schemas"]
    return page(
        request,
        "base/docs.html",
        principal=principal,
        address=public_address(request),
        by_tag=by_tag,
        schemas=schemas,
    )


def describe(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's description of the routes, with security schemes and error responses."""
    description = app.openapi()
    components = description["components"]
    if "securitySchemes" in components:  # already done: FastAPI caches the description
        return description
    cookie = {"type": "apiKey", "in": "cookie", "name": cookie_name(app.state.settings)}
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "cookie": cookie,
    }
    components["schemas"]["Problem"] = Problem.model_json_schema()
    description["security"] = [{"token": []}, {"cookie": []}]
    content = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for operations in description["paths"].values():
        for method, operation in operations.items():
            for status in _refusals(method):
                answer = {
                    "description": HTTPStatus(status).phrase,
                    "content": content,
                }
                operation["responses"][str(status)] = answer
    return description


def _refusals(method: str) -> list[int]:
    """List the status codes of an operation's errors."""
    codes = [400, 401, 403, 404, 413, 422, 429, 503]
    return codes if method in ("get", "head") else [*codes, 409]


def _shapes(operation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the schema names of the request body and the response, empty if they have none."""
    responses = operation["responses"].items()
    answers = (answer for code, answer in responses if code.startswith("2"))
    parts = [("Body", operation.get("requestBody")), *(("Answer", answer) for answer in answers)]
    shapes = []
    for kind, part in parts:
        if schema := ((part or {}).get("content", {}).get("application/json", {}).get("schema")):
            reference = schema.get("$ref") or schema.get("items", {}).get("$ref", "")
            shapes.append((kind, reference.rpartition("/")[2]))
    return shapes
