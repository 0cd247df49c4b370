"""Print the types of the API's responses from the server's OpenAPI description."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from app.main import ROUTES

HEADER = '''"""What the API returns, as TypedDicts with the names of the schemas of /api/v1/docs.

A number is a float, or the text "NaN", "Infinity" or "-Infinity", which JSON lacks. Times are in
seconds since 1970, attempts count from 1, and SHA-256 digests are hexadecimal. Servers of other
versions may send more fields, or fewer. `make response-types` generates this file from the schemas
in app/.
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
    definitions = [_definition(name, schemas[name]) for name in _in_responses(description)]
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "response_types.py", "-"]
    text = "\n\n".join([HEADER, *definitions])
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


def _in_responses(description: dict[str, Any]) -> list[str]:
    """Return the names of the schemas that successful responses have, with their parts, sorted."""
    operations = [each for path in description["paths"].values() for each in path.values()]
    responses = [pair for each in operations for pair in each["responses"].items()]
    open_names = list(_references([body for code, body in responses if code.startswith("2")]))
    names: set[str] = set()
    while open_names:
        if (name := open_names.pop()) not in names:
            names.add(name)
            open_names += _references(description["components"]["schemas"][name])
    return sorted(names)


def _references(part: Any) -> Iterator[str]:
    """Yield the names of the schemas that a part of the description refers to."""
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        yield part["$ref"].rpartition("/")[2]
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _references(inner)


def _definition(name: str, schema: dict[str, Any]) -> str:
    """Return the source of one type."""
    if "properties" not in schema:
        return f"{name}: TypeAlias = {_type(schema)}"
    lines = [f"class {name}(TypedDict):", *_docstring(schema["description"]), ""]
    for field, rule in schema["properties"].items():
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
