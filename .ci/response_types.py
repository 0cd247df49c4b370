"""Print the types of responses that the client names, from the server's OpenAPI description."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from app.main import ROUTES

MODULE = "halfstep.api_client.response_types"
HEADER = '''"""What the client returns, as TypedDicts with the names of the schemas of /api/v1/docs.

A number is a float, or the text "NaN", "Infinity" or "-Infinity", which JSON lacks. Times are in
seconds since 1970, attempts count from 1, and SHA-256 digests are hexadecimal. Servers of other
versions may send more fields, or fewer. `make response-types` generates this file from the schemas
in app/: those that code of halfstep/ imports from here, and their parts.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

from halfstep.telemetry.plain_json import JsonObject
'''
TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "null": "None",
}
LONGEST_LINE = 100  # as in pyproject.toml


def source() -> str:
    """Return the module's source, formatted."""
    application = FastAPI(routes=ROUTES.routes, openapi_url=None)
    description = application.openapi()
    schemas = description["components"]["schemas"]
    names = _with_parts(_imported(), schemas)
    bases = dict(_bases(BaseModel, names))
    definitions = [_definition(name, schemas, bases.get(name)) for name in _in_order(names, bases)]
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "response_types.py", "-"]
    text = "\n\n".join([HEADER, *definitions])
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def _imported() -> Iterator[str]:
    """Yield the names that code of the client and the command imports from the module."""
    for path in Path("halfstep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == MODULE:
                yield from (imported.name for imported in node.names)


def _with_parts(names: Iterator[str], schemas: dict[str, Any]) -> set[str]:
    """Return the names, and those of all schemas that theirs refer to."""
    open_names, found = list(names), set[str]()
    while open_names:
        if (name := open_names.pop()) not in found:
            found.add(name)
            open_names += _references(schemas[name])
    return found


def _bases(model: type[BaseModel], names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each schema whose class extends that of another one, with the other's name."""
    for inner in model.__subclasses__():
        is_ours = inner.__module__.startswith("app.")  # libraries may have equal names
        if is_ours and {model.__name__, inner.__name__} <= names:
            yield inner.__name__, model.__name__
        yield from _bases(inner, names)


def _in_order(names: set[str], bases: dict[str, str]) -> list[str]:
    """Return the names sorted, each after the type that it extends."""
    return sorted(names, key=lambda name: (bases.get(name, name), name in bases, name))


def _references(part: Any) -> Iterator[str]:
    """Yield the names of the schemas that a part of the description refers to."""
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        yield part["$ref"].rpartition("/")[2]
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _references(inner)


def _definition(name: str, schemas: dict[str, Any], base: str | None) -> str:
    """Return the source of one type. base: the type that it extends, if any."""
    schema, inherited = schemas[name], schemas[base]["properties"] if base else {}
    if "properties" not in schema:
        return f"{name}: TypeAlias = {_type(schema)}"
    lines = [f"class {name}({base or 'TypedDict'}):", *_docstring(schema["description"]), ""]
    for field, rule in schema["properties"].items():
        if field in inherited:
            continue
        line = f"    {field}: {_type(rule)}"
        comment = rule.get("description", "")
        if comment and len(line) + len(comment) + 4 > LONGEST_LINE:
            lines += textwrap.wrap(
                comment, LONGEST_LINE, initial_indent="    # ", subsequent_indent="    # "
            )
        elif comment:
            line += f"  # {comment}"
        lines.append(line)
    return "\n".join(lines)


def _docstring(text: str) -> list[str]:
    """Return the lines of a docstring."""
    first, *others = text.splitlines()
    if not others:
        return [f'    """{first}"""']
    return [f'    """{first}', *(f"    {line}".rstrip() for line in others), '    """']


def _type(rule: dict[str, Any]) -> str:
    """Return the annotation of a schema's values."""
    if "$ref" in rule:
        return str(rule["$ref"]).rpartition("/")[2]
    if members := rule.get("anyOf"):
        return " | ".join(dict.fromkeys(_type(member) for member in members))
    if "enum" in rule or "const" in rule:
        return f"Literal[{', '.join(map(repr, rule.get('enum', [rule.get('const')])))}]"
    if rule.get("type") == "array":
        items = rule["items"] if "items" in rule else {"anyOf": rule["prefixItems"]}
        return f"list[{_type(items)}]"
    if rule.get("type") == "object":
        values = rule.get("additionalProperties")
        return f"dict[str, {_type(values)}]" if isinstance(values, dict) else "JsonObject"
    return TYPES.get(rule.get("type", ""), "Any")


if __name__ == "__main__":
    sys.stdout.write(source())
