"""The form of a new run: inputs from a recipe's schema, and parsing of the posted form.

Inputs are named by path. Values that cannot be parsed stay text, are shown as typed, and are
refused by the schema like any other invalid value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.submission.config_schema import (
    Property,
    Schema,
    flat,
    get,
    mistakes,
    properties,
    put,
    with_defaults,
)

#: Groups that a newcomer need not see; they open when they hold an error or a changed value.
ADVANCED = {
    *("data", "modules", "weights", "scaler", "spike"),
    *("checkpoints", "evaluation", "diagnosis"),
}
#: Of training the settings that most runs change; the others fold, as a group of their own.
BASIC = {
    f"training.{name}"
    for name in ("steps", "epochs", "batch_size", "accumulation_steps", "max_grad_norm", "seed")
}
MORE = "training-more"


@dataclass(frozen=True)
class Input:
    """One control. kind: number, text, checkbox or select."""

    source: Property
    kind: str
    text: str
    error: str
    is_changed: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """Hints for the browser; the server checks again."""
        rules = self.source.rules
        if self.kind != "number":
            return {}
        low = rules.get("minimum", rules.get("exclusiveMinimum"))
        high = rules.get("maximum", rules.get("exclusiveMaximum"))
        step = 1 if rules.get("type") == "integer" else "any"
        bounds = {"min": low, "max": high}
        return {k: input_text(v) for k, v in bounds.items() if v is not None} | {"step": step}


@dataclass
class FieldSet:
    """The inputs of one group."""

    name: str
    title: str
    description: str
    inputs: list[Input] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the group is initially open."""
        eventful = any(each.error or each.is_changed for each in self.inputs)
        return self.name not in {*ADVANCED, MORE} or eventful


def field_sets(schema: Schema, config: dict[str, Any], errors: dict[str, str]) -> list[FieldSet]:
    """Return the field sets: the recipe's own group first, then the order of the schema."""
    groups = {
        name: FieldSet(name, each.get("title", name), each.get("description", ""))
        for name, each in schema.get("properties", {}).items()
        if each.get("type") == "object"
    }
    for each in properties(schema):
        if each.group:
            groups[each.group].inputs.append(_input(each, config, errors))
    sets = sorted((g for g in groups.values() if g.inputs), key=lambda g: g.name != "recipe")
    return [part for each in sets for part in _parts(each)]


def _parts(whole: FieldSet) -> list[FieldSet]:
    """Split the rarely used fields of `training` off; other groups stay as they are."""
    basic = [each for each in whole.inputs if each.source.path in BASIC]
    others = [each for each in whole.inputs if each.source.path not in BASIC]
    if not basic or not others:
        return [whole]
    more = FieldSet(MORE, f"More of {whole.title.lower()}", "Speed, memory, repeatability.", others)
    return [replace(whole, inputs=basic), more]


def precision_input(schema: Schema, config: dict[str, Any], errors: dict[str, str]) -> Input:
    """Return the precision control, shown above all groups."""
    found = next(each for each in properties(schema) if each.path == "precision")
    return _input(found, config, errors)


def _input(each: Property, config: dict[str, Any], errors: dict[str, str]) -> Input:
    rules = each.rules
    kinds = {"boolean": "checkbox", "integer": "number", "number": "number"}
    kind = "select" if "enum" in rules else kinds.get(rules.get("type", ""), "text")
    value = get(config, each.path, each.default)
    return Input(each, kind, input_text(value), errors.get(each.path, ""), value != each.default)


def input_text(value: Any) -> str:
    """Return a value as input text: integers without a point, lists with commas."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(schema: Schema, posted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the posted configuration."""
    config: dict[str, Any] = {}
    for each in properties(schema):
        put(config, each.path, parsed(each, str(posted.get(each.path, "")).strip()))
    return config


def carried(
    before: Schema, after: Schema, config: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the changed values that another recipe accepts, for its form.

    With the paths of those that it does not allow, which get its defaults.
    """
    known = {each.path: each.default for each in properties(before)}
    kept: dict[str, Any] = {}
    for each in properties(after):
        value = get(config, each.path)
        if each.path in known and value != known[each.path]:
            put(kept, each.path, value)
    wrong = mistakes(after, with_defaults(after, kept))
    refused = [path for path, _ in flat(kept) if path in wrong]
    for path in refused:
        group, _, name = path.rpartition(".")
        (get(kept, group) if group else kept).pop(name)
    return kept, refused


def parsed(each: Property, text: str) -> Any:
    """Return typed text in a setting's type, or unchanged if it cannot be parsed."""
    kind = each.rules.get("type")
    if kind == "boolean":
        return text in ("true", "on")
    if text == "" and each.is_nullable:
        return None
    if each.is_list:
        return [part for part in map(str.strip, text.split(",")) if part]
    if kind not in ("integer", "number"):
        return text
    try:
        number = float(text)
    except ValueError:
        return text
    if kind == "integer" and number.is_integer():
        try:
            return int(text)
        except ValueError:  # 1e3, or more zeros than Python reads as a whole number
            return int(number)
    return number
