"""Announce on the next page what a form has done: page.js shows it, where a screen reader hears it.

A page that is loaded anew announces nothing by itself, however its list has changed.
"""

from urllib.parse import quote

from fastapi import Request
from fastapi.responses import RedirectResponse

from app.auth.authentication import is_secure

#: Read and deleted by page.js; one that no page has read by then is late.
COOKIE, SECONDS = "halfstep-done", 30


def back_to(request: Request, address: str, said: str) -> RedirectResponse:
    """Lead to a page that announces what was done."""
    answer = RedirectResponse(address, status_code=303)
    answer.set_cookie(
        COOKIE,
        quote(said, safe=""),
        max_age=SECONDS,
        samesite="strict",
        secure=is_secure(request),
    )
    return answer
