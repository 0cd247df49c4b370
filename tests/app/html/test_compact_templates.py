"""Compaction of templates: whitespace that no browser shows is removed."""

from jinja2 import Environment

from app.html.compact_templates import compact
from tests.marks import looped

environment = Environment(trim_blocks=True, lstrip_blocks=True)


def render(source: str) -> str:
    return environment.from_string(compact(source)).render(yes=True, no=False, text="a  b")


@looped(
    "source, expected",
    [
        ("<tr>\n  <td\n    class='x'>\n    1\n  </td>\n</tr>\n", "<tr><td class='x'>1</td></tr>"),
        ("<b>1</b>\n<b>2</b>", "<b>1</b> <b>2</b>"),
        ("<b>1</b>\n  {%- if yes %} 2{% endif %}", "<b>1</b> 2"),
        ("1\n  {% if yes %}\n  2\n  {% endif %}\n{% if yes %}3{% endif %}", "1  2 3"),
        ("{% if yes %}1{% endif %}\n{% if no %}2{% endif %}\n3", "13"),
        ('<p title="{{ 1 if 2 > 1 else 0 }}">\n  {{ text }}\n</p>', '<p title="1">a  b</p>'),
        ("<pre>\n 1\n  2</pre>\n<p>\n3</p>", "<pre>\n 1\n  2</pre><p>3</p>"),
        ("{# of\n two lines #}\n<p>1</p>", "<p>1</p>"),
    ],
)
def test_only_whitespace_that_is_not_shown_is_removed(source: str, expected: str) -> None:
    """Whitespace is kept where a browser shows it: between inline elements and in `pre`."""
    assert render(source) == expected
