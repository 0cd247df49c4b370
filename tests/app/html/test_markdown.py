"""Markdown of notes rendered as HTML."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.html.markdown import markdown
from tests.marks import looped

ALLOWED = {
    *("h2", "h3", "h4", "h5", "h6", "p", "em", "strong", "s", "code", "pre", "blockquote", "a"),
    *("ul", "ol", "li", "hr", "br", "table", "thead", "tbody", "tr", "th", "td", "div"),
    *("input", "img"),
}
#: Of boxes of task lists, and of images of artifacts.
FURTHER = {"type", "disabled", "checked", "aria-label", "src", "alt", "loading"}


class Seen(HTMLParser):
    """Collects elements and their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_what_people_use_is_there() -> None:
    """Lists, code and tables are rendered, headings below the page's own level, and a line break as
    such.
    """
    html = markdown("# Why\n\na *b* **c** `d`\ne\n\n- x\n\n|m|n|\n|-|-|\n|1|2|\n\n~~no~~")
    for piece in ("<h2>Why</h2>", "<em>b</em>", "<br", "<li>x</li>", "<td>1</td>", "<s>no</s>"):
        assert piece in html


def test_task_lists_and_images_of_artifacts() -> None:
    """[ ] and [x] become checkboxes; an artifact's image is shown, other images stay links."""
    html = markdown(
        "- [ ] a *b*\n- [x] c\n- [y] d\n\n[ ] e\n\n![loss <map>](/runs/3/artifacts/7/download)"
    )
    boxes = [fields for name, fields in Seen(html).elements if name == "input"]
    assert [(box["aria-label"], "checked" in box) for box in boxes] == [
        ("To do", False),
        ("Done", True),
    ]
    assert html.count('<li class="task">') == 2
    assert "[y] d" in html
    image = '<img src="/runs/3/artifacts/7/download" alt="loss &lt;map&gt;" loading="lazy">'
    assert image in html
    for other in (
        "/runs/3/cancellation",
        "//elsewhere.example/a",
        "/runs/3/artifacts/7/download/..",
    ):
        assert "<img" not in markdown(f"![x]({other})")


@looped(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt&#58;alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "[x](//elsewhere.example/)",
        "<javascript:alert(1)>",
        "![x](https://elsewhere.example/pixel.png)",
        '[x](https://a.example/"onmouseover="alert(1))',
        "[x]: javascript:alert(1)\n\n[x]",
        '```"><script>\nx\n```',
    ],
)
def test_nothing_in_a_note_acts(text: str) -> None:
    """Notes may have few HTML elements and attributes, and only links to pages; nothing is
    fetched.
    """
    check(text)


@given(st.text(alphabet="<>[]()!&#:;\"'`*_|~-=\\\n\t/ javscripth1", max_size=200))
def test_nothing_acts_whatever_is_typed(text: str) -> None:
    """No note creates an element that acts or a link that is not allowed."""
    check(text)


def check(text: str) -> None:
    for tag, attributes in Seen(markdown(text)).elements:
        assert tag in ALLOWED
        usual = {"href", "rel", "class", "start", "style", "title", "tabindex"}
        assert attributes.keys() <= (usual | FURTHER if tag in ("input", "img") else usual)
        assert tag != "input" or ("disabled" in attributes and attributes["type"] == "checkbox")
        assert tag != "img" or re.fullmatch(
            r"/runs/\d+/artifacts/\d+/download", attributes["src"] or ""
        )
        address = attributes.get("href") or "#"
        assert address.startswith(("http://", "https://", "mailto:", "/", "#"))
        assert not address.startswith("//")
        assert (attributes.get("style") or "text-align:").startswith("text-align:")


@pytest.mark.slow
@looped("piece", ["[", "*a ", "`", "> ", "- ", "|a", "![](", "~~", "a_", "<", "\\"])
def test_the_longest_note_of_one_sign_is_rendered(piece: str) -> None:
    """A note of maximum length of one repeated character is rendered without a recursion error."""
    assert markdown((piece * 20_000)[:20_000])


def test_a_url_on_a_line_of_its_own_becomes_a_chart() -> None:
    """A bare URL or link of one or several runs becomes a chart; within a sentence it
    stays a link.
    """
    picture = (
        '<img src="/charts.svg?runs=3&amp;series=val%2Faccuracy" alt="Chart: val/accuracy of run 3"'
    )
    for text in (
        "/runs/3?chart=val/accuracy",
        "[mine](/runs/3?chart=val/accuracy)",
        "a\n/runs/3?chart=val%2Faccuracy\nb",
    ):
        assert picture in markdown(text)
    assert "runs=1%2C3&amp;series=loss" in markdown("/compare?runs=1,3&x=time")
    assert "series=scale" in markdown("/compare?runs=1,3&draw=scale&draw=loss")
    for text in (
        "see /runs/3?chart=loss",
        "/runs/3",
        "/runs/x?chart=loss",
        "[x](https://elsewhere.example/runs/3?chart=loss)",
        "`/runs/3?chart=loss`",
        "/compare?runs=1,-3",
    ):
        assert "<img" not in markdown(text)
    assert markdown("/runs/3?chart=loss\n\n" * 50).count("<img") == 20
    result = markdown('/runs/3?chart="><script>')
    assert "<script" not in result
