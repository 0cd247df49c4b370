"""The stylesheets: their size, and that they have no unused rules."""

import re
from pathlib import Path

from app.http.assets import compact
from tests.marks import looped

APP = Path(__file__).resolve().parents[2] / "app"
#: Sent of all files, and of those that one page loads before it paints.
MOST_BYTES, MOST_BYTES_OF_A_PAGE = 80_000, 45_000
#: Classes that a template or script completes.
COMPLETED = re.compile(r"(dash|line)-\d|change-(added|removed)")
#: Words of templates that are a class of another component.
CONTEXTUAL = {"differs", "run", "run-name", "settings"}


FILES = {path.stem: compact(path.read_text()) for path in sorted((APP / "static").rglob("*.css"))}
TEMPLATES = {
    str(path.relative_to(APP / "templates")): path.read_text()
    for path in (APP / "templates").rglob("*.html")
}
OF_ALL_PAGES = re.findall(
    r"'(\w+)'", re.findall(r"for name in \((.+?)\) \+ styles", TEMPLATES["base/base.html"])[0]
)


def _classes(styles: str) -> set[str]:
    """Return the classes of the selectors."""
    selectors = re.sub(r'/\*.*?\*/|"[^"]*"|:[^;{}]*[;}]', "", styles, flags=re.DOTALL)
    return set(re.findall(r"\.([a-z][\w-]*)", selectors))


def _with_parts(name: str) -> set[str]:
    """Return a template and those that it extends, includes or imports."""
    parts = {name}
    for other in re.findall(r'(?:include|import|from|extends) "([\w/.]+)"', TEMPLATES[name]):
        parts |= _with_parts(other)
    return parts


def _list_loaded(name: str) -> list[str]:
    """Return the names of the style sheets that a page loads."""
    text = "".join(TEMPLATES[part] for part in _with_parts(name))
    own = re.search(r"{% set styles = (.+?) %}", text)
    return [*OF_ALL_PAGES, *(re.findall(r"'(\w+)'", own[1]) if own else ())]


PAGES = sorted(name for name, text in TEMPLATES.items() if text.startswith("{% extends"))


def test_styles_stay_small() -> None:
    """Stylesheets stay below a size limit; repeated rules belong in system.css."""
    assert len("".join(FILES.values()).encode()) <= MOST_BYTES
    assert len(PAGES) > 30  # the expressions above still find them


@looped("name", PAGES)
def test_a_page_loads_the_styles_of_its_parts_and_few_others(name: str) -> None:
    """A page loads the stylesheets with classes of its templates that one component defines."""
    loaded = _list_loaded(name)
    assert sum(len(FILES[style].encode()) for style in loaded) <= MOST_BYTES_OF_A_PAGE
    text = "".join(TEMPLATES[part] for part in _with_parts(name))
    used = set(re.findall(r"[\w-]+", " ".join(re.findall(r'class="(.*?)"(?=[ >{])', text))))
    styled = set().union(*(_classes(FILES[style]) for style in loaded))
    elsewhere = set().union(*map(_classes, FILES.values()))
    assert sorted((used & elsewhere) - styled - CONTEXTUAL) == []


def test_each_class_is_in_use() -> None:
    """Each class of a selector occurs in a template, a Python module or a script."""
    classes = _classes("\n".join(FILES.values()))
    assert len(classes) > 200  # the expression above still finds them
    used: set[str] = set()
    for kind in ("html", "py", "js"):
        for path in APP.rglob(f"*.{kind}"):
            used.update(re.findall(r"[\w-]+", path.read_text()))
    assert sorted(each for each in classes - used if not COMPLETED.fullmatch(each)) == []


def test_compacting_keeps_what_a_stylesheet_says() -> None:
    """Comments, needless spaces and leading zeros go; spaces between selectors and quotes stay."""
    css = '/* a */\n.a .b, [c="d"] > d { content: ": ; 0.5"; f: 0 0.5em 10.5px; }'
    assert compact(css) == '.a .b,[c=d]>d{content:": ; 0.5";f:0 .5em 10.5px}'
    assert compact("@media (width < 9px) { e { f: g } }") == "@media (width < 9px){e{f:g}}"
