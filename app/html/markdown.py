"""Rendering of notes from Markdown to safe HTML.

HTML in a note is shown as text; links lead only to web pages, e-mail addresses and paths here.
Images are those of a run's artifacts or of a report; others, which would be loaded from other
servers, become links. A chart's URL, or a link to it, on a line of its own becomes the chart's
image. Items that begin with [ ] or [x] are a task list. In a report, fenced blocks of the kinds
`panel` and `runs` become what its page draws in their place.
"""

import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markupsafe import Markup, escape

from app.html.chart_links import Chart, chart_of

#: Level of the page's heading above a note.
LEVEL = 1
#: Approximate limit of charts in a note: the last paragraph may exceed it.
MOST_CHARTS = 20
#: Image of a run, a report or a project, which those who may view or download it can load.
_PICTURE = re.compile(
    r"/runs/\d{1,18}/artifacts/\d{1,18}/download|/reports/(\d{1,9})/images/(\d{1,9})"
    r"|/api/v1/artifact-versions/\d{1,18}/files/[0-9a-f]{16}\.(?:png|jpg|gif|webp)"
)
_TASK = re.compile(r"\[([ xX])\] ")
_PLACE = re.compile(r"(?:https?://|mailto:|/(?!/)|#)", re.IGNORECASE)


Tokens: TypeAlias = Sequence[Token]
Env: TypeAlias = MutableMapping[str, Any]

#: Kinds of fenced blocks that a report draws.
BLOCKS = ("panel", "runs")


@dataclass(frozen=True)
class Block:
    """A fenced block of a report."""

    kind: str
    content: str


@dataclass(frozen=True)
class SharedReport:
    """The read-only link by which a report is shown: it opens the report's own images only."""

    path: str  # of the link
    report_id: int


def markdown(text: str) -> Markup:
    """Return a note's HTML."""
    return Markup(_parser.render(text))  # noqa: S704 - of tokens, each escaped by the renderer


def report(text: str, draw: Callable[[Block], str], shared: SharedReport | None = None) -> Markup:
    """Return a report's HTML. draw: returns the HTML of a block."""
    env = {"draw": draw, "shared": shared}
    return Markup(_parser.render(text, env))  # noqa: S704 - likewise


def blocks_of(text: str) -> Iterator[Block | Chart]:
    """Yield the blocks of a report, and the charts that it embeds by their URLs, in order."""
    for token in _parser.parse(text):
        if token.type == "fence" and token.info.strip() in BLOCKS:
            yield Block(token.info.strip(), token.content)
        for child in token.children or ():
            if child.type == "chart":
                yield child.meta["chart"]


class BaseRenderer(RendererHTML):
    """Renderer of blocks that scroll sideways, also by keys."""

    def fence(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        """Render a fenced block."""
        whole = super().fence(tokens, idx, options, env)
        return whole.replace("<pre>", '<pre tabindex="0">', 1)

    def table_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        """Render the beginning of a table."""
        return (
            f'<div class="table-scroll" tabindex="0">{self.renderToken(tokens, idx, options, env)}'
        )

    def table_close(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        """Render the end of a table."""
        return f"{self.renderToken(tokens, idx, options, env)}</div>"


class _Renderer(BaseRenderer):
    def link_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        tokens[idx].attrSet("rel", "noopener noreferrer nofollow")
        return self.renderToken(tokens, idx, options, env)

    def heading_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        tokens[idx].tag = f"h{min(int(tokens[idx].tag[1:]) + LEVEL, 6)}"
        return self.renderToken(tokens, idx, options, env)

    heading_close = heading_open

    def fence(self, tokens: Tokens, idx: int, options: object, env: Env) -> str:
        kind = tokens[idx].info.strip()
        if kind in BLOCKS and "draw" in env:
            drawn: str = env["draw"](Block(kind, tokens[idx].content))
            return drawn
        return super().fence(tokens, idx, options, env)

    def code_block(self, *arguments: Any) -> str:
        return super().code_block(*arguments).replace("<pre>", '<pre tabindex="0">', 1)

    def image(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        address = str(tokens[idx].attrGet("src"))
        text = self.renderInlineAsText(tokens[idx].children or [], options, env)
        match, shared = _PICTURE.fullmatch(address), env.get("shared")
        if shared is not None and match:
            if match[1] != str(shared.report_id):
                return str(escape(text))
            address = f"{shared.path}/images/{match[2]}"
        if match:
            return Markup('<img src="{}" alt="{}" loading="lazy">').format(address, text)
        return Markup('!<a href="{}" rel="noopener noreferrer nofollow">{}</a>').format(
            address, text
        )

    def task(self, tokens: Tokens, idx: int, options: object, env: Env) -> str:
        is_done = tokens[idx].meta["is_done"]
        state = ' aria-label="Done" checked' if is_done else ' aria-label="To do"'
        return f'<input type="checkbox" disabled{state}> '

    def chart(self, tokens: Tokens, idx: int, options: object, env: Env) -> str:
        chart: Chart = tokens[idx].meta["chart"]
        shared: SharedReport | None = env.get("shared")
        if shared is not None:
            return Markup('<img src="{}" alt="{}" width="480" height="220" loading="lazy">').format(
                f"{shared.path}{chart.address}", chart.words
            )
        return Markup(
            '<a class="chart" href="{}"><img src="{}" alt="{}" width="480" height="220" '
            'loading="lazy"></a>'
        ).format(tokens[idx].meta["address"], chart.address, chart.words)


class _Parser(MarkdownIt):
    def validateLink(self, url: str) -> bool:  # noqa: N802 - as the library has it
        return _PLACE.match(url.strip()) is not None


def _embed(state: StateCore) -> None:
    """Replace lines that contain only a chart's URL by the chart."""
    left = MOST_CHARTS
    for token in state.tokens:
        if token.type == "inline" and token.children and left:
            lines = [_find_chart(line) for line in _lines(token.children)]
            token.children = [child for line in lines for child in line]
            left -= min(sum(line[0].type == "chart" for line in lines if line), left)


def _mark_tasks(state: StateCore) -> None:
    """Replace [ ] or [x] at the beginning of a list item by a checkbox."""
    for item, paragraph, inline in zip(
        state.tokens, state.tokens[1:], state.tokens[2:], strict=False
    ):
        if (item.type, paragraph.type) != ("list_item_open", "paragraph_open"):
            continue
        if not inline.children or inline.children[0].type != "text":
            continue
        first = inline.children[0]
        if (task := _TASK.match(first.content)) is None:
            continue
        item.attrJoin("class", "task")
        first.content = first.content[task.end() :]
        box = Token("task", "", 0, meta={"is_done": task[1] != " "})
        inline.children = [box, *inline.children]


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


def _find_chart(line: list[Token]) -> list[Token]:
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
_parser.core.ruler.push("tasks", _mark_tasks)
_parser.disable(["html_block", "html_inline"])
