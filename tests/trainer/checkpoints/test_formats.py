"""Checkpoint formats: those of earlier versions are converted, newer ones are refused."""

from typing import Any

import pytest

from trainer.checkpoints.formats import FORMAT, FormatError, convert


def state(number: Any, spikes: dict[str, Any], spike: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": number,
        "parts": {"spikes": spikes, "schedule": {}},
        "config": {"precision": "fp16", "spike": spike, "recipe": {"rewind": 3}},
    }


@pytest.mark.parametrize("number", [1, 2])
def test_names_of_the_earliest_versions_are_converted(number: int) -> None:
    """Only the product's earlier names are converted; a recipe's setting of such a name stays."""
    before = {"rewind": True, "most_rewinds": 2, "look_every_steps": 5, "afterwards": "go on"}
    after = {
        "rollback": True,
        "max_rollbacks": 2,
        "check_every_steps": 5,
        "afterwards": "continue",
    }
    read = convert(state(number, {"rewinds": 1, "pending": None}, before))
    assert read == state(FORMAT, {"rollbacks": 1, "pending": None}, after)


def test_a_state_of_format_1_with_todays_names_stays() -> None:
    """A state of format 1 that has today's names already is loaded unchanged."""
    spike = {"afterwards": "fail", "max_rollbacks": 1}
    assert convert(state(1, {"rollbacks": 0}, spike)) == state(FORMAT, {"rollbacks": 0}, spike)
    assert convert({"format": 1, "parts": {}, "config": {}})["parts"] == {}


def test_a_newer_format_is_refused_with_both_numbers() -> None:
    """A checkpoint of a newer format is refused with both numbers; any other file is refused
    too.
    """
    with pytest.raises(FormatError, match=rf"format 99; this version reads formats up to {FORMAT}"):
        convert(state(99, {}, {}))
    for foreign in ({"format": "pt"}, {"model": {}}, [1]):
        with pytest.raises(FormatError, match="not a Halfstep checkpoint"):
            convert(foreign)
