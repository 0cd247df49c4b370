"""Static files with a fingerprint in their URL, which browsers cache forever.

Scripts import each other by bare names, which the page's import map resolves: no build step.
plotly.js is served from the installed plotly package.
"""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

STATIC = Path(__file__).parents[1] / "static"
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Asset:
    """A static file."""

    url: str
    media_type: str
    body: bytes

    @cached_property
    def gzipped(self) -> bytes:
        """The compressed body."""
        return gzip.compress(self.body, 6)


class Assets:
    """All static files, by name and by URL."""

    def __init__(self, prefix: str = "") -> None:
        """prefix: path of the public URL."""
        self._prefix = prefix
        self._by_name = _assets()
        self.by_url = {asset.url: asset for asset in self._by_name.values()}

    def url(self, name: str) -> str:
        """Return the URL of a file."""
        return self._by_name[name].url

    @property
    def import_map(self) -> str:
        """Import map of all scripts, as JSON."""
        imports = {
            name.removesuffix(".js"): self._prefix + asset.url
            for name, asset in self._by_name.items()
            if name.endswith(".js")
        }
        return json.dumps({"imports": imports})


@cache
def _assets() -> dict[str, Asset]:
    plotly = Path(str(files("plotly"))) / "package_data" / "plotly.min.js"
    own = {path.name: _asset(path) for path in sorted(STATIC.rglob("*.*"))}
    return own | {"plotly.js": _asset(plotly)}


def compact(css: str) -> str:
    """Return a stylesheet without comments, and needless whitespace, zeros and quotes."""
    css = re.sub(r'="([a-z][\w-]*)"]', r"=\1]", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))
    parts = re.split(r'("[^"]*")', css)
    for at in range(0, len(parts), 2):
        text = re.sub(r" ?([{};,>]) ?", r"\1", re.sub(r"\s+", " ", parts[at]))
        text = re.sub(r"(?<![\w.])0(\.\d)", r"\1", text)
        parts[at] = text.replace(": ", ":").replace(";}", "}")
    return "".join(parts).strip()


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    if path.suffix == ".css":
        body = compact(body.decode()).encode()
    fingerprint = hashlib.sha256(body).hexdigest()[:12]
    url = f"/static/{path.stem}.{fingerprint}{path.suffix}"
    return Asset(url, MEDIA_TYPES[path.suffix], body)


@router.get("/static/{name}")
def static(request: Request, name: str) -> Response:
    """Send a static file."""
    asset: Asset | None = request.app.state.assets.by_url.get(f"/static/{name}")
    if asset is None:
        raise HTTPException(404, "There is no such file.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(asset.gzipped, media_type=asset.media_type, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
