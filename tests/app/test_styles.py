"""The stylesheets: how large they are, and that nothing in them is left over."""

import re
from pathlib import Path

APP = Path(__file__).resolve().parents[2] / "app"
MOST_BYTES = 84_000
#: Classes that a template or script completes.
COMPLETED = re.compile(r"(dash|line)-\d|change-(added|removed)")


def _styles() -> str:
    return "\n".join(path.read_text() for path in sorted((APP / "static").rglob("*.css")))


def test_styles_stay_small() -> None:
    """A page loads them before it paints; what repeats belongs in system.css."""
    assert len(_styles().encode()) <= MOST_BYTES


def test_each_class_is_in_use() -> None:
    """Each class of a selector occurs in a template, a Python module or a script."""
    selectors = re.sub(r'/\*.*?\*/|"[^"]*"|:[^;{}]*[;}]', "", _styles(), flags=re.DOTALL)
    classes = set(re.findall(r"\.([a-z][\w-]*)", selectors))
    assert len(classes) > 200  # the expression above still finds them
    used: set[str] = set()
    for kind in ("html", "py", "js"):
        for path in APP.rglob(f"*.{kind}"):
            used.update(re.findall(r"[\w-]+", path.read_text()))
    assert sorted(each for each in classes - used if not COMPLETED.fullmatch(each)) == []
