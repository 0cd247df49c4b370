"""Flash messages: the next page announces the result of a form, also to screen readers.

A page load by itself announces nothing, even if its list has changed.
"""

from urllib.parse import quote

from fastapi import Request
from fastapi.responses import RedirectResponse

from app.http.credentials import is_secure

#: Read and deleted by page.js; expires if no page reads it in time.
COOKIE, SECONDS = "halfstep-done", 30


def back_to(request: Request, address: str, message: str) -> RedirectResponse:
    """Redirect to a page that announces a message."""
    response = RedirectResponse(address, status_code=303)
    response.set_cookie(
        COOKIE,
        quote(message, safe=""),
        max_age=SECONDS,
        samesite="strict",
        secure=is_secure(request),
    )
    return response
