"""Validation of configurations against a recipe's schema."""

from typing import Any

from app.submission.config_schema import Property, mistakes, parse, put, with_defaults
from tests.app.conftest import CONFIG, SCHEMA
from tests.marks import looped


def test_omitted_settings_get_their_defaults() -> None:
    """An empty configuration gets the recipe's defaults."""
    assert with_defaults(SCHEMA, {}) == CONFIG
    assert mistakes(SCHEMA, CONFIG) == {}


@looped(
    "path, value, message",
    [
        (
            "training.batch_size",
            5000,
            "5000 is not valid; allowed: a whole number from 1 to 1,437",
        ),
        (
            "training.batch_size",
            "many",
            "many is not valid; allowed: a whole number from 1 to 1,437",
        ),
        ("training.steps", 1.5, "1.5 is not valid; allowed: a whole number of at least 1"),
        ("training.steps", None, "it is empty; allowed: a whole number of at least 1"),
        (
            "training.max_grad_norm",
            -1,
            "-1 is not valid; allowed: a number greater than 0, or off",
        ),
        ("training.fused", 1, "1 is not valid; allowed: true or false"),
        (
            "scaler.init_scale",
            float("inf"),
            "inf is not valid; allowed: a number greater than 0",
        ),
        (
            "scaler.init_scale",
            float("nan"),
            "nan is not valid; allowed: a number greater than 0",
        ),
        ("precision", "fp8", "fp8 is not valid; allowed: one of fp16, bf16, fp32"),
        (
            "training.batchsize",
            64,
            "there is no such field; did you mean training.batch_size? allowed: steps, batch_size,",
        ),
        ("batch_size", 64, "there is no such field; did you mean training.batch_size? allowed: "),
        ("bs", 64, "there is no such field; did you mean training.batch_size? allowed: "),
        ("model", 1, "there is no such field; allowed: precision, training, modules, scaler"),
        (
            "modules.fp32",
            ["a" * 41],
            f"{'a' * 41} is not valid; allowed: at most 3 texts of 1 to 40 characters",
        ),
        (
            "modules.fp32",
            ["a", "b", "c", "d"],
            "['a', 'b', 'c', 'd'] is not valid; allowed: at most 3 texts of 1 to 40 characters",
        ),
    ],
)
def test_an_error_names_field_value_and_allowed_values(path: str, value: Any, message: str) -> None:
    """Each invalid value is reported under its own path, and nothing else is."""
    config = with_defaults(SCHEMA, {})
    put(config, path, value)
    found = mistakes(SCHEMA, config)
    assert found.keys() == {path}
    assert found[path].startswith(message)


@looped("text", ["", "off", None])
def test_a_setting_that_may_be_empty_is_switched_off_by_a_word(text: str | None) -> None:
    """ "off" or an empty text clears a setting that may be empty, and is an error for any other."""
    config = {"training": {"max_grad_norm": text, "steps": text}}
    whole = with_defaults(SCHEMA, config)
    assert whole["training"]["max_grad_norm"] is None
    assert mistakes(SCHEMA, whole).keys() == {"training.steps"}
    assert config == {"training": {"max_grad_norm": text, "steps": text}}


def test_a_number_may_be_a_power_of_two() -> None:
    """A text of that kind stays where the setting is one, and any other is a mistake."""
    config = {"training": {"steps": "2^4"}, "scaler": {"init_scale": "2^-3"}}
    whole = with_defaults(SCHEMA, config)
    assert (whole["training"]["steps"], whole["scaler"]["init_scale"]) == (16, 0.125)
    assert mistakes(SCHEMA, whole) == {}
    for text in ("3^2", "2^x", "2^2000"):
        changed = with_defaults(SCHEMA, {"scaler": {"init_scale": text}})
        assert mistakes(SCHEMA, changed).keys() == {"scaler.init_scale"}


def test_a_group_that_is_no_object_is_a_mistake() -> None:
    """A value other than an object for a group of settings is reported as a mistake."""
    assert "training" in mistakes(SCHEMA, with_defaults(SCHEMA, {"training": 3}))


def test_a_valid_configuration_is_converted_to_the_types_of_the_schema() -> None:
    """2.0, a whole number in JSON Schema, becomes 2; values of other types stay."""
    fields = {
        "count": {"type": "integer"},
        "keep": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "rate": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "word": {"type": "string"},
    }
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": fields}}}
    given = {"count": 3.0, "keep": 2.0, "rate": 2.0, "sizes": [8.0, 16], "word": "2.0"}
    found = parse(schema, {"a": given, "precision": "fp16"})
    expected = {"count": 3, "keep": 2, "rate": 2.0, "sizes": [8, 16], "word": "2.0"}
    assert repr(found) == repr({"a": expected, "precision": "fp16"})
    assert parse(fields["keep"], None) is None


@looped(
    "rules, allowed",
    [
        ({"type": "number", "maximum": 2.0**127}, "a number of at most 2^127"),
        ({"type": "number", "minimum": 2.0**-126, "maximum": 1}, "a number from 2^-126 to 1"),
        ({"type": "number", "maximum": 1e30}, "a number of at most 1e+30"),
        ({"type": "integer", "maximum": 2**32}, "a whole number of at most 4,294,967,296"),
        ({"type": "string", "pattern": "^a"}, "text that matches ^a"),
        ({"type": "string", "pattern": "^a", "examples": ["ab"]}, "text such as ab"),
    ],
)
def test_allowed_values_are_short(rules: dict[str, Any], allowed: str) -> None:
    """An allowed bound with an exponent is shown as a power of two, a pattern by its example."""
    assert Property("a.b", "a", rules).allowed == allowed
