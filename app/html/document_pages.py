"""Pages of the documentation."""

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.html.documents import NAMES, RECIPE_TEMPLATE, documents, recipe_template
from app.html.rendering import page
from db.errors import NotFound

router = Router(prefix="/help")


@router.get("", SIGNED_IN)
def show_first() -> RedirectResponse:
    """Redirect to the first document, which lists the others."""
    return RedirectResponse(f"/help/{NAMES[0]}")


@router.get(f"/{RECIPE_TEMPLATE}", SIGNED_IN)
def download_recipe_template() -> Response:
    """Download the file that recipes are copied from."""
    headers = {"Content-Disposition": f'attachment; filename="{RECIPE_TEMPLATE}"'}
    return Response(recipe_template(), media_type="text/x-python", headers=headers)


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
