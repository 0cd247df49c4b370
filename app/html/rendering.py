"""Rendering of templates to pages, and to fragments for live streams."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import DictLoader, Environment, StrictUndefined
from sqlalchemy.orm import Session

from app.auth import audit
from app.auth.authentication import Principal, SignedIn
from app.dependencies import Db
from app.files.file_names import file_name
from app.html import formats
from app.html.compact_templates import compact
from app.html.documents import term
from app.html.markdown import markdown
from app.http.credentials import is_secure
from app.http.path_prefix import with_prefix
from db.runs.outcomes import OUTCOMES
from db.settings import Settings
from db.tables import User
from db.telemetry import damage

_FOLDER = Path(__file__).parents[1] / "templates"
#: Read once: an upgrade replaces the files of a running server.
_TEMPLATES = {
    path.relative_to(_FOLDER).as_posix(): compact(path.read_text())
    for path in _FOLDER.rglob("*.html")
}
_environment = Environment(
    loader=DictLoader(_TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(formats.FILTERS)
_environment.filters["markdown"] = markdown
_environment.globals.update(file_name=file_name, outcomes=OUTCOMES, term=term)

#: A flash message: the next page announces the result of a form, also to screen readers, since a
#: page load by itself announces nothing. Read and deleted by page.js; expires if no page reads it.
#: Error of a form whose text has another version by now, as in app/static/run/metadata.js.
CHANGED_MEANWHILE = (
    "This was changed in the meantime, by another user or in another tab. Save again to replace "
    "that text with yours."
)
FLASH_COOKIE, FLASH_SECONDS = "halfstep-done", 30


@dataclass(frozen=True)
class PageContext:
    """A signed-in user's request for a page, and the responses to it."""

    request: Request
    session: Session
    principal: Principal

    @property
    def user(self) -> User:
        """The signed-in user."""
        return self.principal.user

    @property
    def settings(self) -> Settings:
        """The server's settings."""
        settings: Settings = self.request.app.state.settings
        return settings

    def render(
        self,
        template: str,
        *,
        errors: Mapping[str, str] | None = None,
        status_code: int = 200,
        **values: object,
    ) -> HTMLResponse:
        """Render a whole page. errors: of its form, by field; the status is then 422."""
        code, values["errors"] = (422 if errors else status_code), errors or {}
        return page(self.request, template, principal=self.principal, status_code=code, **values)

    def redirect(self, address: str, message: str = "") -> RedirectResponse:
        """Redirect to a page, which announces the message."""
        response = RedirectResponse(address, status_code=303)
        if message:
            response.set_cookie(
                FLASH_COOKIE,
                quote(message, safe=""),
                max_age=FLASH_SECONDS,
                samesite="strict",
                secure=is_secure(self.request),
            )
        return response


async def _context(request: Request, session: Db, principal: SignedIn) -> PageContext:
    return PageContext(request, session, principal)


#: Signs the user in as `SignedIn` does.
Context = Annotated[PageContext, Depends(_context)]


def page(
    request: Request,
    template: str,
    *,
    principal: Principal | None = None,
    status_code: int = 200,
    **values: object,
) -> HTMLResponse:
    """Render a whole page."""
    if status_code >= 400:
        audit.discard(request)
    prefix = request.app.state.settings.path_prefix
    text = fragment(
        template,
        principal=principal,
        assets=request.app.state.assets,
        nonce=request.state.nonce,
        theme=_theme(request),
        path=request.url.path,
        root=prefix,
        damage=damage.describe_collected(),
        shown_folder=request.app.state.shown_folder,
        is_posted=request.method == "POST",
        **values,
    )
    return HTMLResponse(with_prefix(text, prefix), status_code=status_code)


def _theme(request: Request) -> str:
    """Return the theme that the viewer chose in this browser; empty: that of the system."""
    chosen = request.cookies.get("halfstep-theme", "")
    return chosen if chosen in {"light", "dark"} else ""


def fragment(template: str, **values: object) -> str:
    """Render a piece of a page."""
    return _environment.get_template(template).render(**values)
