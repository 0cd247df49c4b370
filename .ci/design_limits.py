"""Check the design: circles of imports, sizes of classes, long lines of templates, and more.

A limit is today's figure: lower it with the code, and never raise it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

PACKAGES = ("app", "db", "halfstep", "trainer", "worker")
MOST_LINES, MOST_METHODS, MOST_PARAMETERS = 300, 30, 7
MOST_COLUMNS = 120  # of a line of a template
#: Most imports in circles (types excluded), classes and functions above these sizes, statements in
#: app/ instead of db/, uses of `Any`, in source that is written by hand, and lines of templates.
LIMITS = {"circles": 0, "classes": 0, "functions": 43, "statements": 7, "Any": 1210}
LIMITS["lines of templates"] = 22
GENERATED = {Path("halfstep/api_client/response_types.py")}


def main() -> int:
    """Print what exceeds a limit; return 1 if something does."""
    found: dict[str, list[str]] = {name: [] for name in LIMITS}
    found["circles"] += _circles()
    paths = sorted(path for package in PACKAGES for path in Path(package).rglob("*.py"))
    for path in [path for path in paths if path not in GENERATED]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef) and (size := _size_of_class(node)):
                found["classes"].append(f"{place}: {node.name} has {size}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = _parameters(node)
                if count > MOST_PARAMETERS:
                    found["functions"].append(f"{place}: {node.name} has {count} parameters")
            elif isinstance(node, ast.Name) and node.id == "select" and path.parts[0] == "app":
                found["statements"].append(place)
            elif isinstance(node, ast.Name) and node.id == "Any":
                found["Any"].append(place)
    for path in sorted(Path("app/templates").rglob("*.html")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MOST_COLUMNS:
                found["lines of templates"].append(f"{path}:{number}: {len(line)} columns")
    is_over = False
    for name, limit in LIMITS.items():
        count = len(found[name])
        print(f"{name}: {count} (limit {limit})")
        if count > limit:
            is_over = True
            print(*found[name], sep="\n")
    return int(is_over)


def _size_of_class(node: ast.ClassDef) -> str:
    """Return the size of a class that is too large, else an empty text."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
    is_large = lines > MOST_LINES or methods > MOST_METHODS
    return f"{lines} lines, {methods} methods" if is_large else ""


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in every)


def _circles() -> Iterator[str]:
    """Yield each import between two modules that import each other, directly or not."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            if graph.chain_exists(importer=imported, imported=module):
                yield f"{module} imports {imported}, which imports it"


if __name__ == "__main__":
    sys.exit(main())
