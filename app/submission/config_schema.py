"""JSON Schema of a recipe: fields, defaults and descriptions of allowed values.

A configuration is an object of groups; a group is an object of plain fields and lists of strings.
`precision` is next to the groups.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from halfstep.config_groups import OFF
from halfstep.number_formats import power_of_two
from halfstep.suggestions import did_you_mean
from halfstep.telemetry.plain_json import JsonObject

Schema = JsonObject


@dataclass(frozen=True)
class Property:
    """One field of a configuration."""

    path: str  # "training.batch_size"
    group: str  # "training", or empty
    schema: Schema

    @property
    def title(self) -> str:
        """The title on the page."""
        return str(self.schema.get("title") or self.path.rpartition(".")[2])

    @property
    def description(self) -> str:
        """The description; may be empty."""
        return str(self.schema.get("description", ""))

    @property
    def is_nullable(self) -> bool:
        """Whether null is allowed."""
        return any(option.get("type") == "null" for option in self.schema.get("anyOf", ()))

    @property
    def may_be_off(self) -> bool:
        """Whether "off" stands for null: it is no value of a number, a list or a switch."""
        return self.is_nullable and self.kind not in {"text", "choice"}

    @property
    def rules(self) -> Schema:
        """The schema of a value that is not null."""
        options = self.schema.get("anyOf", ())
        return next((option for option in options if option.get("type") != "null"), self.schema)

    @property
    def is_list(self) -> bool:
        """Whether it is a list of strings."""
        return bool(self.rules.get("type") == "array")

    @property
    def kind(self) -> str:
        """Label of the type."""
        if "enum" in self.rules:
            return "choice"
        if self.is_list:
            return "texts"
        return _KINDS.get(self.rules.get("type", ""), "text")

    @property
    def default(self) -> Any:
        """The default value."""
        return self.schema.get("default")

    @property
    def allowed(self) -> str:
        """Description of the allowed values."""
        if "enum" in self.rules:
            return "one of " + ", ".join(map(str, self.rules["enum"]))
        if self.is_list:
            most, longest = self.rules.get("maxItems"), self.rules["items"].get("maxLength")
            texts = f"at most {most} texts" if most else "texts"
            return texts + (f" of 1 to {longest} characters" if longest else "")
        kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
        kind = kinds.get(self.rules.get("type", ""), "text")
        bounds = [
            f"{words} {_limit(self.rules[key])}" for key, words in _BOUNDS if key in self.rules
        ]
        if {"minimum", "maximum"} <= self.rules.keys():
            bounds = [f"from {_limit(self.rules['minimum'])} to {_limit(self.rules['maximum'])}"]
        if "maxLength" in self.rules:
            bounds = [f"of at most {self.rules['maxLength']} characters"]
        if "examples" in self.rules:
            bounds = [f"such as {self.rules['examples'][0]}"]
        elif "pattern" in self.rules:
            bounds = [f"that matches {self.rules['pattern']}"]
        # "a number of at most 1", but "a number greater than 0 and at most 1"
        bounds[1:] = [bound.removeprefix("of ") for bound in bounds[1:]]
        text = " ".join((kind, " and ".join(bounds))).strip()
        empty = ", or off" if self.may_be_off else ", or nothing" if self.is_nullable else ""
        return f"{text}{empty}"


def _limit(number: float) -> str:
    """Return a bound as text: 1,000,000; 2^127."""
    text = f"{number:,.15g}"
    mantissa, exponent = math.frexp(number)
    return f"2^{exponent - 1}" if "e" in text and mantissa == 0.5 else text


_KINDS = {"integer": "whole number", "number": "number", "boolean": "yes or no"}
_BOUNDS = (
    ("minimum", "of at least"),
    ("exclusiveMinimum", "greater than"),
    ("maximum", "of at most"),
    ("exclusiveMaximum", "less than"),
)


def properties(schema: Schema) -> Iterator[Property]:
    """Yield all fields in the schema's order."""
    for name, rules in schema.get("properties", {}).items():
        if rules.get("type") == "object":
            for inner, field in rules.get("properties", {}).items():
                yield Property(f"{name}.{inner}", name, field)
        else:
            yield Property(name, "", rules)


def get(config: JsonObject, path: str, default: Any = None) -> Any:
    """Return the value at a path."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def put(config: JsonObject, path: str, value: object) -> None:
    """Set the value at a path."""
    *groups, name = path.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    config[name] = value


def flat(config: JsonObject, prefix: str = "") -> list[tuple[str, Any]]:
    """Return each field's path and value."""
    pairs: list[tuple[str, object]] = []
    for name, value in config.items():
        if isinstance(value, dict):
            pairs += flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", value))
    return pairs


def with_defaults(schema: Schema, config: JsonObject) -> JsonObject:
    """Fill in defaults, null for "off" or an empty text where these are no values, and 2^16.

    Unknown fields stay, and are rejected by validation.
    """
    result = {
        key: dict(value) if isinstance(value, dict) else value for key, value in config.items()
    }
    for field in properties(schema):
        inside = result.setdefault(field.group, {}) if field.group else result
        if isinstance(inside, dict):
            name = field.path.rpartition(".")[2]
            inside.setdefault(name, field.default)
            if field.may_be_off and inside[name] in OFF:
                inside[name] = None
            elif field.rules.get("type") in ("integer", "number"):
                inside[name] = power_of_two(inside[name]) or inside[name]
    return result


def mistakes(schema: Schema, config: JsonObject) -> dict[str, str]:
    """Return the errors of a configuration by path."""
    fields = {field.path: field for field in properties(schema)}
    errors: dict[str, str] = {}
    for error in Draft202012Validator(schema).iter_errors(config):
        path = ".".join(map(str, error.absolute_path))
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for name in error.instance.keys() - known.keys():
                full = f"{path}.{name}" if path else str(name)
                meant = did_you_mean(full, fields)
                errors[full] = f"there is no such field; {meant}allowed: {', '.join(known)}"
        elif path in fields:
            errors[path] = violation(fields[path], error.instance)
        elif (whole := path.rpartition(".")[0]) in fields:  # an item of a list
            errors[whole] = violation(fields[whole], error.instance)
        else:
            errors[path or "config"] = error.message
    for path, field in fields.items():
        value = get(config, path)
        if isinstance(value, float) and not math.isfinite(value):
            errors[path] = violation(field, value)
    return errors


def parse(schema: Schema, value: object) -> Any:
    """Return a valid value in the schema's type: 2.0 is 2 where integers are expected."""
    options = schema.get("anyOf", (schema,))
    kinds = {option.get("type"): option for option in options}
    if isinstance(value, dict):
        fields = kinds.get("object", {}).get("properties", {})
        return {name: parse(fields.get(name, {}), item) for name, item in value.items()}
    if isinstance(value, list):
        items = kinds.get("array", {}).get("items", {})
        return [parse(items, item) for item in value]
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value)
    return value


def beyond(schema: Schema, config: JsonObject, paths: Collection[str]) -> dict[str, str]:
    """Return errors of integers beyond the range of a float, by path."""
    return {
        field.path: violation(field, value)
        for field in properties(schema)
        if field.path in paths and any(bound in field.rules for bound, _words in _BOUNDS)
        if isinstance(value := get(config, field.path), int)
    }


def violation(field: Property, value: object) -> str:
    """Return the error message for a value, which is shown with the path or title of its field."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # as it was typed: -1, not -1.0
    wrong = "it is empty" if value in (None, "") else f"{str(value)[:100]} is not valid"
    return f"{wrong}; allowed: {field.allowed}"
