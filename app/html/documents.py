"""Documents of docs/ as pages, as shipped in the wheel, and links to glossary entries.

Links between documents lead to their pages; links to other files of the source are removed.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from app.html.markdown import BaseRenderer, Env, Tokens

#: Names in URLs, in the order of the list.
NAMES = (
    *("first-run", "watch-a-script", "check-a-script"),
    *(
        "watch",
        "check",
        "precision-lab",
        "recipes",
        "commands",
        "compare",
        "reports",
        "alerts",
        "teams",
        "operations",
        "clusters",
    ),
    *("client", "diagnosis", "glossary", "amp", "security"),
)
_DOCUMENT = re.compile(
    r"(?:(?:\.\./)?(?:tutorial|how-to|reference|explanation)/)?([\w-]+)\.md(#[\w-]+)?"
)
#: What recipes are copied from: a link to it downloads it.
RECIPE_TEMPLATE = "recipe_template.py"
_SETTINGS = re.compile(r"Settings?: ")


@dataclass(frozen=True)
class Document:
    """A document."""

    name: str
    title: str
    headings: dict[str, str]  # of its sections, by anchor
    html: Markup


@cache
def documents() -> MappingProxyType[str, Document]:
    """Return all documents by name; read once."""
    return MappingProxyType({name: _read(name) for name in NAMES})


def term(path: str) -> str:
    """Return the URL that explains a setting, such as scaler.growth_interval; or empty."""
    return _terms().get(path, "")


@cache
def _terms() -> dict[str, str]:
    urls, anchor = {}, ""
    tokens = _parser.parse(_text("glossary"))
    for heading, token in pairwise(tokens):
        if heading.type == "heading_open":
            anchor = slug(token)
        elif token.type == "inline" and _SETTINGS.match(token.content):
            codes = (child.content for child in token.children or () if child.type == "code_inline")
            urls.update(dict.fromkeys(codes, f"/help/glossary#{anchor}"))
    return urls


def slug(heading: Token) -> str:
    """Return the anchor of a heading, in GitHub's format."""
    return re.sub(r"[^\w\- ]", "", _plain(heading).lower()).replace(" ", "-")


def recipe_template() -> bytes:
    """Return the file that recipes are copied from."""
    return (files("app") / "help" / "recipe_template.txt").read_bytes()


def _text(name: str) -> str:
    return (files("app") / "help" / f"{name}.md").read_text()


def _read(name: str) -> Document:
    tokens = _parser.parse(_text(name))
    heads = [
        (opening.tag, token)
        for opening, token in pairwise(tokens)
        if opening.type == "heading_open"
    ]
    title = _plain(heads[0][1])
    headings = {slug(token): _plain(token) for tag, token in heads if tag == "h2"}
    html = _parser.renderer.render(tokens, _parser.options, {})
    return Document(name, title, headings, Markup(html))  # noqa: S704 - our own documents


def _plain(heading: Token) -> str:
    return "".join(child.content for child in heading.children or ())


class _Renderer(BaseRenderer):
    def heading_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        tokens[idx].attrSet("id", slug(tokens[idx + 1]))
        return self.renderToken(tokens, idx, options, env)

    def link_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        target = str(tokens[idx].attrGet("href"))
        if match := _DOCUMENT.fullmatch(target):
            tokens[idx].attrSet("href", f"/help/{match[1]}{match[2] or ''}")
        elif target == RECIPE_TEMPLATE:
            tokens[idx].attrSet("href", f"/help/{target}")
        elif not target.startswith(("#", "https://")):
            closing = next(token for token in tokens[idx:] if token.type == "link_close")
            tokens[idx].tag = closing.tag = "span"
            tokens[idx].attrs = {}
        return self.renderToken(tokens, idx, options, env)

    def image(self, *_: object) -> str:
        return ""  # images are only for the README


_parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
