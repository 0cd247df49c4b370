"""Notes as people write them, in Markdown, as HTML that can do nothing.

HTML in a note is text; a link leads to a page, an address of mail or a place here, and to no
script; a picture would be fetched from elsewhere, so that it is a link. A chart's address, or a
link there, on a line of its own is that chart's picture.
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

#: Of the page, the heading below which a note stands.
LEVEL = 1
#: Of one note, more or less: those of its last paragraph all are.
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
    """Put charts in the place of lines that are nothing but a chart's address."""
    left = MOST_CHARTS
    for token in state.tokens:
        if token.type == "inline" and token.children and left:
            lines = [_charted(line) for line in _lines(token.children)]
            token.children = [each for line in lines for each in line]
            left -= min(sum(line[0].type == "chart" for line in lines if line), left)


def _lines(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Part what stands in a paragraph at its breaks, which are lines of their own here."""
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
