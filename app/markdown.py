"""Notes as people write them, in Markdown, as HTML that can do nothing.

HTML in a note is text; a link leads to a page, an address of mail or a place here, and to no
script; a picture would be fetched from elsewhere, so that it is a link.
"""

import re
from collections.abc import MutableMapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

#: Of the page, the heading below which a note stands.
LEVEL = 1
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


_parser = _Parser("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
_parser.enable(["table", "strikethrough"])
_parser.disable(["image", "html_block", "html_inline"])
