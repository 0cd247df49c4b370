"""Templates without the whitespace that no browser shows."""

import re

#: Elements around and between which whitespace is not shown.
BLOCKS = (
    "address article aside blockquote body caption col colgroup dd details dialog div dl dt "
    "fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li link "
    "main meta nav ol optgroup option p path search section summary table tbody td template tfoot "
    "th thead title tr ul"
).replace(" ", "|")
#: What stays as it is: text whose whitespace is shown, and comments of Jinja.
KEPT = re.compile(r"<(pre|textarea|script|style)\b.*?</\1>|\{#.*?#\}", re.DOTALL)
VALUE = r""""[^"]*"|'[^']*'|\{\{.*?\}\}|\{%.*?%\}|[^<>"'{]+"""
BEFORE = re.compile(rf"\s+(?=</?(?:{BLOCKS})\b)")
AFTER = re.compile(rf"(<(?:{BLOCKS})\b(?:{VALUE})*+>|</(?:{BLOCKS})>)\s+")
#: What Jinja removes: a line break after a statement, and the blanks before one in the next line.
TRIMMED = re.compile(r"(?<=%\})\n(?=\S| *\{%) *")
BREAK = re.compile(r"\s*\n\s*")


def compact(source: str) -> str:
    """Return a template in few lines: breaks become spaces, or nothing next to a block."""
    parts, at = [], 0
    for kept in KEPT.finditer(source):
        parts += [_compact(source[at : kept.start()]), kept[0]]
        at = kept.end()
    return "".join([*parts, _compact(source[at:])])


def _compact(markup: str) -> str:
    text = BREAK.sub(" ", TRIMMED.sub("", markup))
    return AFTER.sub(r"\1", BEFORE.sub("", text))
