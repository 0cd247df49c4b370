"""Rendering of notes from Markdown to safe HTML.

HTML in a note is shown as text; links lead only to web pages, e-mail addresses and paths here;
images, which would be loaded from other servers, become links. A chart's URL, or a link to it, on a
line of its own becomes the chart's image.
"""

import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markupsafe import Markup

from app.html.chart_links import Chart, chart_of

#: Level of the page's heading above a note.
LEVEL = 1
#: Approximate limit of charts in a note: the last paragraph may exceed it.
MOST_CHARTS = 20
_PLACE = re.compile(r"(?:https?://|mailto:|/(?!/)|#)", re.IGNORECASE)


def markdown(text: str) -> Markup:
    """Return a note's HTML."""
    return Markup(_parser.render(text))  # noqa: S704 - of tokens, each escaped by the renderer


class _Renderer(RendererHTML):
    def link_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        tokens[idx].attrSet("rel", "noopener noreferrer nofollow")
        return self.renderToken(tokens, idx, options, env)

    def heading_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        tokens[idx].tag = f"h{min(int(tokens[idx].tag[1:]) + LEVEL, 6)}"
        return self.renderToken(tokens, idx, options, env)

    heading_close = heading_open

    def fence(self, *arguments: Any) -> str:
        return super().fence(*arguments).replace("<pre>", '<pre tabindex="0">', 1)

    def code_block(self, *arguments: Any) -> str:
        return super().code_block(*arguments).replace("<pre>", '<pre tabindex="0">', 1)

    def chart(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        chart: Chart = tokens[idx].meta["chart"]
        return Markup(
            '<a class="chart" href="{}"><img src="{}" alt="{}" width="480" height="220" '
            'loading="lazy"></a>'
        ).format(tokens[idx].meta["address"], chart.address, chart.words)

    def table_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        return '<div class="table-scroll" tabindex="0">' + self.renderToken(
            tokens, idx, options, env
        )

    def table_close(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        return self.renderToken(tokens, idx, options, env) + "</div>"


class _Parser(MarkdownIt):
    def validateLink(self, url: str) -> bool:  # noqa: N802 - as the library has it
        return _PLACE.match(url.strip()) is not None


def _embed(state: StateCore) -> None:
    """Replace lines that contain only a chart's URL by the chart."""
    left = MOST_CHARTS
    for token in state.tokens:
        if token.type == "inline" and token.children and left:
            lines = [_charted(line) for line in _lines(token.children)]
            token.children = [child for line in lines for child in line]
            left -= min(sum(line[0].type == "chart" for line in lines if line), left)


def _lines(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Split a paragraph into lines at its breaks; a break is a line of its own."""
    line: list[Token] = []
    for token in tokens:
        if token.type in ("softbreak", "hardbreak"):
            yield from (line, [token])
            line = []
        else:
            line.append(token)
    yield line


def _charted(line: list[Token]) -> list[Token]:
    written = [token for token in line if token.type != "text" or token.content.strip()]
    kinds = [token.type for token in written]
    if kinds == ["text"]:
        address = written[0].content.strip()
    elif kinds == ["link_open", "text", "link_close"]:
        address = str(written[0].attrGet("href"))
    else:
        return line
    if (chart := chart_of(address)) is None:
        return line
    return [Token("chart", "", 0, meta={"chart": chart, "address": address})]


_parser = _Parser("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
_parser.enable(["table", "strikethrough"])
_parser.core.ruler.push("charts", _embed)
_parser.disable(["image", "html_block", "html_inline"])
