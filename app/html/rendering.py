"""Rendering of templates to pages, and to fragments for live streams."""

from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import DictLoader, Environment, StrictUndefined

from app.auth import audit
from app.auth.authentication import Principal
from app.files.file_names import file_name
from app.html import formats
from app.html.documents import term
from app.html.markdown import markdown
from app.http.path_prefix import with_prefix
from db.runs.outcomes import OUTCOMES
from db.telemetry import damage

_FOLDER = Path(__file__).parents[1] / "templates"
#: Read once: an upgrade replaces the files of a running server.
_TEMPLATES = {
    path.relative_to(_FOLDER).as_posix(): path.read_text() for path in _FOLDER.rglob("*.html")
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


def page(
    request: Request,
    template: str,
    *,
    principal: Principal | None = None,
    status_code: int = 200,
    **values: Any,
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
        **values,
    )
    return HTMLResponse(with_prefix(text, prefix), status_code=status_code)


def _theme(request: Request) -> str:
    """Return the theme that the viewer chose in this browser; empty: that of the system."""
    chosen = request.cookies.get("halfstep-theme", "")
    return chosen if chosen in {"light", "dark"} else ""


def fragment(template: str, **values: Any) -> str:
    """Render a piece of a page."""
    return _environment.get_template(template).render(**values)
