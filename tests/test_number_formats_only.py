"""All numbers are formatted by one module, in Python, templates and scripts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Modules whose digits are read by machines (addresses, SVG, JSON, settings) or are exact limits.
MACHINE_READ = {
    *("app/html/chart_links.py", "app/html/formats.py", "app/runs/static_charts.py"),
    *("app/runs/grouping.py", "app/reports/blocks.py", "app/telemetry/suggested_actions.py"),
    *("app/submission/config_schema.py", "db/queue/quotas.py", "halfstep/mcp/bounds.py"),
    "app/sweeps/optuna_study.py",
    *("halfstep/session/card.py", "halfstep/number_formats.py", "trainer/console.py"),
    "trainer/recipes/mlp.py",
}
SPEC = re.compile(r"[gfeG%]$")
#: Attributes, coordinates and styles in templates.
ATTRIBUTE = re.compile(r"""(?:data-[\w-]+|d|style|value|placeholder)="[^"]*$|--share: $""")
TEMPLATE = re.compile(r"'%(?:\.\d+)?[gfe][^']*'\s*\|\s*format|\|\s*round\b")
SCRIPT = re.compile(
    r"toFixed|toPrecision|toExponential|toLocaleString\(|NumberFormat|%\{[^}]*:[.,]"
)
#: The formatter, what an address and an input hold, and the labels of axes.
SCRIPTS = {"formats.js", "url_state.js", "panel_dialogs.js", "axis.js"}


def _specs(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = "".join(
                str(part.value)
                for part in getattr(node.format_spec, "values", ())
                if isinstance(part, ast.Constant)
            )
            if SPEC.search(spec):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {spec}"


def test_python_has_no_other_format() -> None:
    """Sentences, tables and pages format numbers by halfstep.number_formats only."""
    paths = (
        p for room in ("app", "db", "halfstep", "trainer") for p in (ROOT / room).rglob("*.py")
    )
    found = [
        spec
        for path in paths
        if path.relative_to(ROOT).as_posix() not in MACHINE_READ
        for spec in _specs(path)
    ]
    assert not found


def test_templates_have_no_other_format() -> None:
    """Templates format numbers by filters only, except coordinates and attributes."""
    found = []
    for path in (ROOT / "app/templates").rglob("*.html"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in TEMPLATE.finditer(line):
                before = line[: match.start()]
                if not ATTRIBUTE.search(before[: before.rfind("{{")]):
                    found.append(f"{path.name}:{number}: {match[0]}")
    assert not found


def test_scripts_have_no_other_format() -> None:
    """Scripts format numbers by formats.js only."""
    found = [
        f"{path.name}: {match[0]}"
        for path in (ROOT / "app/static").rglob("*.js")
        if path.name not in SCRIPTS
        for match in SCRIPT.finditer(path.read_text())
    ]
    assert not found
