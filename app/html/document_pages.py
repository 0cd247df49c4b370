"""Pages of the documentation."""

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.html.documents import NAMES, documents
from app.html.rendering import page
from db.errors import NotFound

router = Router(prefix="/help")


@router.get("", SIGNED_IN)
def show_first() -> RedirectResponse:
    """Redirect to the first document, which lists the others."""
    return RedirectResponse(f"/help/{NAMES[0]}")


@router.get("/{name}", SIGNED_IN)
def show_document(request: Request, name: str, principal: SignedIn) -> HTMLResponse:
    """Show a document, with links to the others."""
    by_name = documents()
    if name not in by_name:
        known = ", ".join(NAMES)
        raise NotFound(f"There is no help page {name[:50]}; pages: {known}.")
    document = by_name[name]
    return page(
        request, "base/help.html", principal=principal, document=document, documents=by_name
    )
