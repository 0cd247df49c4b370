"""Lines of Python as HTML: keywords, strings and comments, and marked expressions."""

import keyword
import tokenize
from collections.abc import Collection, Sequence
from itertools import groupby

from markupsafe import Markup, escape

#: Classes of tokens; a text in three versions of Python.
CLASSES = {
    tokenize.COMMENT: "comment",
    tokenize.STRING: "string",
    **{
        getattr(tokenize, name): "string"
        for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
        if hasattr(tokenize, name)
    },
}
#: Start, end and class of a part of a line.
Part = tuple[int, int, str]


def lines_of(text: str) -> list[str]:
    """Return the lines of a source as Python counts them."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def parts_of(lines: Sequence[str]) -> dict[int, list[Part]]:
    """Return the parts with a class by line number; those before an error in the source."""
    parts: dict[int, list[Part]] = {}
    try:
        for token in tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__):
            name = CLASSES.get(token.type, "")
            if token.type == tokenize.NAME and keyword.iskeyword(token.string):
                name = "keyword"
            if not name:
                continue
            (first, start), (last, end) = token.start, token.end
            for number in range(first, last + 1):
                begin = start if number == first else 0
                stop = end if number == last else len(lines[number - 1])
                parts.setdefault(number, []).append((begin, stop, name))
    except (SyntaxError, tokenize.TokenError):
        pass
    return parts


def html_of(line: str, parts: Sequence[Part], marked: Collection[str]) -> Markup:
    """Return a line as HTML. marked: expressions in it."""
    names, is_marked = [""] * len(line), [False] * len(line)
    for start, end, name in parts:
        names[start:end] = [name] * (end - start)
    for expression in filter(None, set(marked)):
        if (start := line.find(expression)) >= 0:
            is_marked[start : start + len(expression)] = [True] * len(expression)
    html, at = [], 0
    for (name, has_mark), group in groupby(zip(names, is_marked, strict=True)):
        size = sum(1 for _character in group)
        piece, at = escape(line[at : at + size]), at + size
        classes = f"{name} marked".strip() if has_mark else name
        html.append(
            Markup('<span class="{}">{}</span>').format(classes, piece) if classes else piece
        )
    return Markup("").join(html)
