import json
from typing import Literal

import jsonschema
import pytest
from pydantic import Field

from app.submission.config_schema import with_defaults
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import ConfigError, config_model, config_schema, parse_config


class OwnConfig(RecipeConfig):
    width: int = Field(8, ge=1, title="Width", description="Units of the hidden layer.")


class Example:
    name = "example"
    Config = OwnConfig
    defaults = {"training": {"steps": 400}, "scaler": {"init_scale": 2.0**24}}  # noqa: RUF012


def test_a_recipe_overrides_shared_defaults():
    """A recipe's own defaults override the shared ones, and the others stay."""
    config = parse_config(Example, {"training": {"batch_size": 3}, "recipe": {"width": 2}})
    assert (config.training.steps, config.training.batch_size) == (400, 3)
    assert (config.scaler.init_scale, config.scaler.growth_interval) == (2.0**24, 2000)
    assert (config.recipe.width, config.recipe.learning_rate) == (2, 1e-3)


def test_the_overrides_of_one_recipe_do_not_reach_another():
    """Overridden defaults of one recipe do not change another recipe's."""

    class Other(Example):
        defaults = {}  # noqa: RUF012

    assert config_model(Example)().training.steps == 400
    assert config_model(Other)().training.steps == 1000


def test_the_schema_says_defaults_bounds_and_help_for_every_field():
    """The schema has default, bounds and help of every field, without references."""
    schema = config_schema(Example)
    assert "$ref" not in json.dumps(schema)
    for name, group in schema["properties"].items():
        for field in group.get("properties", {"": group}).values():
            assert {"title", "description", "default"} <= field.keys(), name
    assert schema["properties"]["training"]["properties"]["steps"]["default"] == 400
    assert schema["properties"]["recipe"]["properties"]["width"]["minimum"] == 1


def test_every_number_of_the_schema_has_bounds():
    """Numbers without bounds get the range that browsers and devices support."""

    class Loose(OwnConfig):
        count: int = Field(1, title="Count", description="Any.")
        share: float | None = Field(None, gt=0, title="Share", description="Any.")

    class Unbounded(Example):
        Config = Loose

    schema = config_schema(Unbounded)
    for group in schema["properties"].values():
        for name, field in group.get("properties", {}).items():
            for option in field.get("anyOf", [field]):
                if option.get("type") in ("integer", "number"):
                    assert {"minimum", "exclusiveMinimum"} & option.keys(), name
                    assert {"maximum", "exclusiveMaximum"} & option.keys(), name
    fields = schema["properties"]["recipe"]["properties"]
    assert (fields["count"]["minimum"], fields["count"]["maximum"]) == (-(2**53), 2**53)
    [share] = [option for option in fields["share"]["anyOf"] if option["type"] == "number"]
    assert (share["exclusiveMinimum"], share["maximum"]) == (0, 2.0**127)


@pytest.mark.parametrize("memory", [1e308, 10**400, 65537])
def test_a_request_for_more_memory_than_any_device_has_is_rejected(memory):
    """A setting that needs more memory than any device has is rejected by schema and model."""
    values = {"training": {"device_memory_gib": memory}}
    validator = jsonschema.Draft202012Validator(config_schema(Example))
    assert not validator.is_valid(config_model(Example)().model_dump() | values)
    with pytest.raises(ConfigError, match=r"training\.device_memory_gib"):
        parse_config(Example, values)


@pytest.mark.slow
def test_the_schema_and_the_model_agree():
    """A full configuration is valid, and schema and model reject the same values."""
    schema = config_schema(Example)
    jsonschema.validate(config_model(Example)().model_dump(), schema)
    for bad in (
        {"training": {"steps": 0}},
        {"training": {"steps": "many"}},
        {"training": {"stepz": 1}},
        {"scaler": {"growth_factor": 1.0}},
        {"scaler": {"backoff_factor": 1.0}},
        {"precision": "fp4"},
        {"recipe": {"depth": 1}},
        {"unknown": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
        with pytest.raises(ConfigError):
            parse_config(Example, bad)


def test_an_error_names_each_field_its_value_and_the_allowed_values():
    """Each invalid field has its own line with the value and the allowed ones."""
    with pytest.raises(ConfigError) as raised:
        parse_config(Example, {"training": {"steps": 0}, "recipe": {"width": "wide"}})
    first, second = str(raised.value).splitlines()
    assert first == "training.steps is 0: allowed: at least 1"
    assert second.startswith("recipe.width is 'wide': allowed: a whole number")


class WordsConfig(RecipeConfig):
    label: str | None = None
    mode: Literal["off", "on"] | None = None


class Worded(Example):
    Config = WordsConfig


@pytest.mark.parametrize("field", ["label", "mode"])
def test_off_is_a_value_of_texts_and_choices(field):
    """A text or choice "off" stays a text, in the recipe and on the server."""
    given = {"recipe": {field: "off"}}
    assert getattr(parse_config(Worded, given).recipe, field) == "off"
    assert with_defaults(config_schema(Worded), given)["recipe"][field] == "off"


def test_a_number_may_be_a_power_of_two():
    """A text of that form stays one where the setting is a text."""
    values = {"scaler": {"init_scale": "2^20"}, "recipe": {"label": "2^20"}}
    config = parse_config(Worded, values)
    assert (config.scaler.init_scale, config.recipe.label) == (2.0**20, "2^20")
    assert with_defaults(config_schema(Worded), values)["recipe"]["label"] == "2^20"


@pytest.mark.parametrize("text", ["", "off", None])
def test_a_setting_that_may_be_empty_is_switched_off_by_a_word(text):
    """ "off" clears a setting that may be empty, and its error messages mention it."""
    config = parse_config(Example, {"training": {"max_grad_norm": text}})
    assert config.training.max_grad_norm is None
    with pytest.raises(ConfigError, match="allowed: a number, or off"):
        parse_config(Example, {"training": {"max_grad_norm": "none"}})
    with pytest.raises(ConfigError, match=r"training\.steps"):
        parse_config(Example, {"training": {"steps": text}})


def test_a_recipe_with_impossible_defaults_is_rejected():
    """A recipe with an unknown or out-of-range default is rejected."""

    class Misspelt(Example):
        defaults = {"training": {"stepz": 1}}  # noqa: RUF012

    class OutOfRange(Example):
        defaults = {"training": {"steps": 0}}  # noqa: RUF012

    class WrongGroup(Example):
        defaults = {"trainings": {}}  # noqa: RUF012

    with pytest.raises(ConfigError, match="stepz"):
        config_model(Misspelt)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        config_model(OutOfRange)
    with pytest.raises(ConfigError, match="trainings"):
        config_model(WrongGroup)


@pytest.mark.parametrize("other", [{"accumulation_steps": 2}, {"unused_parameters": True}])
def test_a_static_graph_rejects_changes(other):
    """A static graph rejects each setting that changes it, before DDP fails in its first step."""
    with pytest.raises(
        ConfigError, match=f"static_graph cannot be combined with {next(iter(other))}"
    ):
        parse_config(Example, {"training": {"static_graph": True, **other}})


def test_a_cuda_graph_rejects_accumulation():
    """A CUDA graph rejects gradient accumulation, which would overwrite gradients; without
    compilation it has no effect.
    """
    values = {"compile_mode": "reduce-overhead", "accumulation_steps": 2}
    with pytest.raises(
        ConfigError, match="compile_mode reduce-overhead cannot be combined with accumul"
    ):
        parse_config(Example, {"training": {"compile": True, **values}})
    assert parse_config(Example, {"training": values}).training.accumulation_steps == 2
