"""The documents of docs/ as pages, as they come with the wheel, and where a word stands in them.

Their links lead to each other's pages; what they link to of the source alone is no link here.
"""

import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

#: By their addresses, in the order in which they are listed.
NAMES = (
    *("first-run", "watch-a-script"),
    *("watch", "recipes", "commands", "alerts", "teams", "operations", "clusters"),
    *("client", "diagnosis", "glossary", "amp", "security"),
)
_DOCUMENT = re.compile(
    r"(?:(?:\.\./)?(?:tutorial|how-to|reference|explanation)/)?([\w-]+)\.md(#[\w-]+)?"
)
_SETTINGS = re.compile(r"Settings?: ")


@dataclass(frozen=True)
class Document:
    """A document. headings: of its sections, by anchor."""

    name: str
    title: str
    headings: dict[str, str]
    html: Markup


@cache
def documents() -> MappingProxyType[str, Document]:
    """Return all documents by name; read once."""
    return MappingProxyType({name: _read(name) for name in NAMES})


def term(path: str) -> str:
    """Return the address that explains a setting, by its path, scaler.growth_interval; or empty."""
    return _terms().get(path, "")


@cache
def _terms() -> dict[str, str]:
    found, anchor = {}, ""
    tokens = _parser.parse(_text("glossary"))
    for heading, token in pairwise(tokens):
        if heading.type == "heading_open":
            anchor = slug(token)
        elif token.type == "inline" and _SETTINGS.match(token.content):
            codes = (each.content for each in token.children or () if each.type == "code_inline")
            found.update(dict.fromkeys(codes, f"/help/glossary#{anchor}"))
    return found


def slug(heading: Token) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", _plain(heading).lower()).replace(" ", "-")


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
    return "".join(each.content for each in heading.children or ())


class _Renderer(RendererHTML):
    def heading_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        tokens[idx].attrSet("id", slug(tokens[idx + 1]))
        return self.renderToken(tokens, idx, options, env)

    def link_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        target = str(tokens[idx].attrGet("href"))
        if found := _DOCUMENT.fullmatch(target):
            tokens[idx].attrSet("href", f"/help/{found[1]}{found[2] or ''}")
        elif not target.startswith(("#", "https://")):
            closing = next(each for each in tokens[idx:] if each.type == "link_close")
            tokens[idx].tag = closing.tag = "span"
            tokens[idx].attrs = {}
        return self.renderToken(tokens, idx, options, env)

    def image(self, *_: Any) -> str:
        return ""  # pictures are the README's

    def fence(self, *arguments: Any) -> str:
        return super().fence(*arguments).replace("<pre>", '<pre tabindex="0">', 1)

    def table_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        table = self.renderToken(tokens, idx, options, env)
        return f'<div class="table-scroll" tabindex="0">{table}'

    def table_close(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        return f"{self.renderToken(tokens, idx, options, env)}</div>"


_parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
