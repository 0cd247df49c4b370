"""The form generated from a schema, and how it is parsed."""

from copy import deepcopy
from typing import Any

from app.submission.config_schema import get, with_defaults
from app.submission.forms import field_sets, precision_input, read
from tests.app.conftest import CONFIG, SCHEMA
from tests.marks import looped


def _make_form(config: dict[str, Any]) -> dict[str, str]:
    """Return the fields that a browser sends for this configuration."""
    inputs = [each for group in field_sets(SCHEMA, config, {}) for each in group.inputs]
    inputs.append(precision_input(SCHEMA, config, {}))
    return {
        each.source.path: each.text
        for each in inputs
        if not (each.kind == "checkbox" and each.text == "false")
    }


@looped(
    "changes",
    [
        {},
        {"training": {"fused": False, "max_grad_norm": None}},
        {"precision": "bf16", "scaler": {"init_scale": 0.1}},
        {"modules": {"fp32": ["model.head", "model.blocks.*.norm"]}},
    ],
)
def test_what_the_form_shows_is_what_it_sends(changes: dict[str, Any]) -> None:
    """A configuration that fills the form is sent unchanged, with its types."""
    config = with_defaults(SCHEMA, changes)
    back = read(SCHEMA, _make_form(config))
    assert back == config
    assert isinstance(get(back, "training.steps"), int)


def test_a_title_with_a_gap_has_its_value_there() -> None:
    """A value is shown within its title if that has a gap for it, otherwise after the title."""
    schema = deepcopy(SCHEMA)
    schema["properties"]["training"]["properties"]["batch_size"]["title"] = "Every … steps"
    groups = {group.name: group for group in field_sets(schema, CONFIG, {})}
    size, rate = get(CONFIG, "training.batch_size"), get(CONFIG, "training.steps")
    assert f"every {size} steps" in groups["training"].summary
    assert f"steps {rate}" in groups["training"].summary
    assert "TF32 false" in groups["training-more"].summary
    config = read(schema, _make_form(CONFIG) | {"training.batch_size": "1"})
    groups = {group.name: group for group in field_sets(schema, config, {})}
    assert "every step," in groups["training"].summary


@looped("typed", ["many", "", "1e999", "1.5", "0x10", "0,5"])
def test_input_is_preserved(typed: str) -> None:
    """Invalid form input stays in its field, with the error."""
    posted = _make_form(CONFIG) | {"training.steps": typed}
    config = read(SCHEMA, posted)
    groups = field_sets(SCHEMA, config, {"training.steps": "wrong"})
    (shown,) = (
        each for group in groups for each in group.inputs if each.source.path == "training.steps"
    )
    assert shown.text == {"1e999": "inf"}.get(typed, typed)
    assert shown.error == "wrong"


def test_whole_numbers_may_be_written_as_floats() -> None:
    """A value such as 1e3 is accepted as 1000 steps."""
    config = read(SCHEMA, _make_form(CONFIG) | {"training.steps": "1e3"})
    assert config["training"]["steps"] == 1000


def test_inputs_have_the_kind_of_their_setting() -> None:
    """Numbers and switches have input elements of their own type."""
    inputs = {
        each.source.path: each for group in field_sets(SCHEMA, CONFIG, {}) for each in group.inputs
    }
    assert inputs["training.batch_size"].kind == "number"
    assert inputs["training.max_grad_norm"].kind == "number"
    assert inputs["training.fused"].kind == "checkbox"


def test_advanced_groups_open_for_their_errors() -> None:
    """The group of scaler settings opens if a value in it differs from the default or is
    invalid.
    """

    def is_open(config: dict[str, Any], errors: dict[str, str]) -> bool:
        return next(g.is_open for g in field_sets(SCHEMA, config, errors) if g.name == "scaler")

    assert not is_open(CONFIG, {})
    assert is_open(with_defaults(SCHEMA, {"scaler": {"init_scale": 2.0}}), {})
    assert is_open(CONFIG, {"scaler.init_scale": "wrong"})
