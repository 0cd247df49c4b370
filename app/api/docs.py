"""What the API can do: as OpenAPI for tools, and as a page for people, with nothing from a CDN."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.auth import SignedIn
from app.rendering import page

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
def openapi(request: Request, _visitor: SignedIn) -> dict[str, Any]:
    """Return the OpenAPI description."""
    description: dict[str, Any] = request.app.openapi()
    return description


@router.get("/docs")
def docs(request: Request, visitor: SignedIn) -> HTMLResponse:
    """Show it."""
    description = request.app.openapi()
    by_tag: dict[str, list[dict[str, Any]]] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            entry = {"path": path, "method": method.upper(), "shapes": _shapes(operation)}
            entry |= operation
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(entry)
    schemas = description["components"]["schemas"]
    address = str(request.base_url).rstrip("/")
    return page(
        request, "docs.html", visitor=visitor, address=address, by_tag=by_tag, schemas=schemas
    )


def _shapes(operation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the body and the answer are: a name among the objects, or empty."""
    answers = (each for code, each in operation["responses"].items() if code.startswith("2"))
    parts = [("Body", operation.get("requestBody")), *(("Answer", each) for each in answers)]
    shapes = []
    for kind, part in parts:
        if schema := ((part or {}).get("content", {}).get("application/json", {}).get("schema")):
            reference = schema.get("$ref") or schema.get("items", {}).get("$ref", "")
            shapes.append((kind, reference.rpartition("/")[2]))
    return shapes
