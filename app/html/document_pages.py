"""The documents, one a page."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.html.documents import NAMES, documents
from app.html.rendering import page
from db.errors import NotFound

router = APIRouter(prefix="/help")


@router.get("")
@requires(SIGNED_IN)
def show_first(_principal: SignedIn) -> RedirectResponse:
    """Lead to the first of them, which lists the others."""
    return RedirectResponse(f"/help/{NAMES[0]}")


@router.get("/{name}")
@requires(SIGNED_IN)
def show_document(request: Request, name: str, principal: SignedIn) -> HTMLResponse:
    """Show one of them, with the others beside it."""
    found = documents()
    if name not in found:
        known = ", ".join(NAMES)
        raise NotFound(f"There is no page of help called {name[:50]}; there are {known}.")
    return page(
        request, "base/help.html", principal=principal, document=found[name], documents=found
    )
