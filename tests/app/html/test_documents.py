"""Help: the documents as pages, and links from pages into them."""

import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.html.documents import NAMES, RECIPE_TEMPLATE, documents, term
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import RunConfig

ROOT = Path(__file__).parents[3]
LINKS = re.compile(r'(?<![\w"\'])/help/(\w+)(?:#([\w-]+))?')


GUIDES = ("tutorial", "how-to")
QUOTED = re.compile(r'"([A-Z][^"`]{2,40})"|(?<![*\w])\*([A-Z][^*`]{1,40})\*(?![*\w])')


class Seen(HTMLParser):
    """Collects anchors and links of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.anchors += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name == "href"]


def test_labels_that_guides_quote_are_on_pages() -> None:
    """A label that a guide quotes or emphasizes is in the sources of pages and commands."""
    spoken = " ".join(
        " ".join(path.read_text().split())
        for folder in ("app", "halfstep", "trainer")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".html", ".js", ".py")
    )
    texts = [path.read_text() for part in GUIDES for path in (ROOT / "docs" / part).glob("*.md")]
    quoted = [
        " ".join("".join(found).split()).rstrip(".,…")
        for text in texts
        for found in QUOTED.findall(re.sub(r"```.*?```|`[^`]*`", "`", text, flags=re.DOTALL))
    ]
    assert len(quoted) > 50
    torchs = "Found no NVIDIA driver on your system"
    assert [label for label in quoted if label not in spoken and label != torchs] == []


def test_help_is_behind_the_sign_in(stranger: TestClient, browser: TestClient) -> None:
    """All documents of docs/ have pages behind the sign-in; unknown names get 404."""
    assert stranger.get("/help/amp").status_code in (303, 401)
    parts = ("tutorial", "how-to", "reference", "explanation")
    assert {path.stem for part in parts for path in (ROOT / "docs" / part).glob("*.md")} == set(
        NAMES
    )
    assert browser.get("/help").headers["location"] == "/help/first-run"
    page = browser.get("/help/amp").text
    assert '<h2 id="the-loop">The loop</h2>' in page
    assert '<a href="#the-loop">The loop</a>' in page
    template = browser.get("/help/recipe_template.py")
    assert template.content == (ROOT / "docs/how-to/recipe_template.py").read_bytes()
    assert template.headers["content-disposition"].startswith("attachment")
    missing = browser.get("/help/nothing")
    assert (missing.status_code, "no help page nothing" in missing.text) == (404, True)


def test_every_link_leads_somewhere() -> None:
    """Links in documents and templates have targets, and anchors are unique."""
    seen = {name: Seen(document.html) for name, document in documents().items()}
    for name, each in seen.items():
        assert len(each.anchors) == len(set(each.anchors)), name
        for link in each.links:
            page, _, anchor = link.removeprefix("/help/").partition("#")
            if not link.startswith("https://") and page != RECIPE_TEMPLATE:
                target = seen[page or name]
                assert not anchor or anchor in target.anchors, (name, link)
    assert f"/help/{RECIPE_TEMPLATE}" in seen["recipes"].links
    used = 0
    for path in (ROOT / "app" / "templates").rglob("*.html"):
        for page, anchor in re.findall(r'"/help/(\w+)#?([\w-]*)"', path.read_text()):
            used += 1
            assert not anchor or anchor in seen[page].anchors, (path.name, page, anchor)
    assert used > 5


def test_settings_that_the_glossary_names_are_settings() -> None:
    """Each setting in the glossary is a setting of all runs, and links lead to its entry."""
    schema = RunConfig[RecipeConfig].model_json_schema()
    paths = set(
        re.findall(r"`([a-z_]+(?:\.\w+)?)`", (ROOT / "docs/reference/glossary.md").read_text())
    )
    for path in paths:
        at = schema
        for name in path.split("."):
            at = schema["$defs"][at["$ref"].rpartition("/")[2]] if "$ref" in at else at
            assert name in at["properties"], path
            at = at["properties"][name]
    assert term("scaler.growth_interval") == "/help/glossary#growth-interval"
    assert term("training.steps") == ""


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.xdist_group("wheel")
def test_wheel_brings_the_documents(tmp_path: Path) -> None:
    """An installed wheel contains the help pages, word for word."""
    source = tmp_path / "source"
    for name in ("app", "db", "docs", "halfstep", "migrations", "trainer", "worker"):
        without = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=without, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = ["pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        brought = {name for name in wheel.namelist() if name.startswith("app/help/")}
        pages = {f"app/help/{name}.md" for name in NAMES}
        assert brought == pages | {"app/help/recipe_template.txt"}
        assert wheel.read("app/help/amp.md") == (ROOT / "docs/explanation/amp.md").read_bytes()
