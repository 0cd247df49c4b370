"""Static files."""

import gzip
import json

import pytest
from starlette.testclient import TestClient

from app.http.assets import STATIC, Assets, compact


def test_files_are_kept_for_ever_under_their_fingerprint(stranger: TestClient) -> None:
    """The URL of a file has its fingerprint, so browsers need not request it again."""
    answer = stranger.get(Assets().url("base.css"))
    assert answer.headers["cache-control"].endswith("immutable")
    assert answer.text == compact((STATIC / "base" / "base.css").read_text())
    assert stranger.get("/static/base.000000000000.css").status_code == 404


def test_every_import_is_in_the_import_map() -> None:
    """Every module that a script imports is in the import map, plotly.js among them."""
    names = json.loads(Assets().import_map)["imports"]
    assert "plotly" in names
    for script in STATIC.rglob("*.js"):
        for line in script.read_text().splitlines():
            if line.startswith("import "):
                assert line.split("'")[1] in names, f"{script.name}: {line}"


@pytest.mark.slow
def test_large_files_are_compressed(stranger: TestClient) -> None:
    """plotly.js is sent with gzip to clients that accept it."""
    url = Assets().url("plotly.js")
    packed = stranger.get(url, headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    plain = stranger.get(url, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert len(gzip.compress(plain.content, 1)) < len(plain.content) / 2
