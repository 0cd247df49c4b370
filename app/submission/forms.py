"""The form of a new run: inputs from a recipe's schema, and parsing of the posted form.

Inputs are named by path. Values that cannot be parsed stay text, are shown unchanged, and are
rejected by the schema like any other invalid value.
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
from halfstep.number_formats import power_of_two
from halfstep.telemetry.plain_json import JsonObject

#: Collapsed groups for advanced users; they open if they contain an error or a changed value.
ADVANCED = {
    *("data", "modules", "weights", "scaler", "spike"),
    *("checkpoints", "evaluation", "diagnosis", "lab"),
}
#: Settings of `training` that most runs change; the others are a collapsed group of their own.
BASIC = {
    f"training.{name}"
    for name in ("steps", "epochs", "batch_size", "accumulation_steps", "max_grad_norm", "seed")
}
MORE = "training-more"
#: Main settings, shown above all groups; a recipe without one of them has fewer.
MAIN = (
    "recipe.learning_rate",
    "training.steps",
    "training.batch_size",
    "training.max_grad_norm",
    "scaler.growth_interval",
)
LISTED = 5  # settings in the summary of a group; form.js keeps it up to date


@dataclass(frozen=True)
class Input:
    """One control of the form."""

    source: Property
    kind: str  # number, text, checkbox or select
    text: str
    error: str
    is_changed: bool

    @property
    def default_text(self) -> str:
        """The default as the control would show it."""
        return input_text(self.source.default)


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
        is_relevant = any(control.error or control.is_changed for control in self.inputs)
        return self.name not in {*ADVANCED, MORE} or is_relevant

    @property
    def has_error(self) -> bool:
        """Whether any of its values is invalid."""
        return any(control.error for control in self.inputs)

    @property
    def changed(self) -> int:
        """Number of values that differ from their defaults."""
        return sum(control.is_changed for control in self.inputs)

    @property
    def summary(self) -> str:
        """Values of its first settings, for the collapsed group."""
        known = [control for control in self.inputs if control.text]
        texts = [_with_value(control.source.title, control.text[:40]) for control in known[:LISTED]]
        return ", ".join(t[0].lower() + t[1:] if t[1:2].islower() else t for t in texts)


def _with_value(title: str, text: str) -> str:
    """Return a title with its value, in the place of "…" if it has one."""
    if text == "1" and title.endswith(" … steps"):
        return title.replace(" … steps", " step")
    return title.replace("…", text) if "…" in title else f"{title} {text}"


def field_sets(schema: Schema, config: JsonObject, errors: dict[str, str]) -> list[FieldSet]:
    """Return the field sets: the recipe's own group first, then the order of the schema."""
    groups = {
        name: FieldSet(name, rules.get("title", name), rules.get("description", ""))
        for name, rules in schema.get("properties", {}).items()
        if rules.get("type") == "object"
    }
    for prop in properties(schema):
        if prop.group:
            groups[prop.group].inputs.append(_input(prop, config, errors))
    sets = sorted((g for g in groups.values() if g.inputs), key=lambda g: g.name != "recipe")
    return [part for field_set in sets for part in _parts(field_set)]


def _parts(whole: FieldSet) -> list[FieldSet]:
    """Split off the rarely used fields of `training`; other groups are unchanged."""
    basic = [control for control in whole.inputs if control.source.path in BASIC]
    others = [control for control in whole.inputs if control.source.path not in BASIC]
    if not basic or not others:
        return [whole]
    more = FieldSet(MORE, f"More {whole.title.lower()} settings", "", others)
    return [replace(whole, inputs=basic), more]


def main_settings(field_sets: list[FieldSet]) -> tuple[list[Input], list[FieldSet]]:
    """Split off the main settings; groups without other settings are left out."""
    controls = {
        control.source.path: control for field_set in field_sets for control in field_set.inputs
    }
    main = [controls[path] for path in MAIN if path in controls]
    others = [
        replace(field_set, inputs=[control for control in field_set.inputs if control not in main])
        for field_set in field_sets
    ]
    return main, [field_set for field_set in others if field_set.inputs]


def precision_input(schema: Schema, config: JsonObject, errors: dict[str, str]) -> Input:
    """Return the precision control, shown above all groups."""
    precision = next(prop for prop in properties(schema) if prop.path == "precision")
    return _input(precision, config, errors)


def _input(prop: Property, config: JsonObject, errors: dict[str, str]) -> Input:
    rules = prop.rules
    kinds = {"boolean": "checkbox", "integer": "number", "number": "number"}
    kind = "select" if "enum" in rules else kinds.get(rules.get("type", ""), "text")
    value = get(config, prop.path, prop.default)
    return Input(prop, kind, input_text(value), errors.get(prop.path, ""), value != prop.default)


def input_text(value: object) -> str:
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
    config: JsonObject = {}
    for prop in properties(schema):
        put(config, prop.path, parse(prop, str(posted.get(prop.path, "")).strip()))
    return config


def carry_over(
    before: Schema, after: Schema, config: JsonObject
) -> tuple[dict[str, Any], list[str]]:
    """Return the changed values that another recipe accepts, for its form.

    Also returns the paths of those that it does not accept, which get its defaults.
    """
    known = {prop.path: prop.default for prop in properties(before)}
    accepted: JsonObject = {}
    for prop in properties(after):
        value = get(config, prop.path)
        if prop.path in known and value != known[prop.path]:
            put(accepted, prop.path, value)
    wrong = mistakes(after, with_defaults(after, accepted))
    rejected = [path for path, _ in flat(accepted) if path in wrong]
    for path in rejected:
        group, _, name = path.rpartition(".")
        (get(accepted, group) if group else accepted).pop(name)
    return accepted, rejected


def parse(prop: Property, text: str) -> object:
    """Return text in a setting's type, or unchanged if it cannot be parsed."""
    kind = prop.rules.get("type")
    if kind == "boolean":
        return text in ("true", "on")
    if text == "" and prop.is_nullable:
        return None
    if prop.is_list:
        return [part for part in map(str.strip, text.split(",")) if part]
    if kind not in ("integer", "number"):
        return text
    try:
        number = power_of_two(text) or float(text)
    except ValueError:
        return text
    if kind == "integer" and number.is_integer():
        try:
            return int(text)
        except ValueError:  # 1e3, or more digits than Python parses as an integer
            return int(number)
    return number
