"""Capabilities of a machine: lines of the previous version are read, and errors are named."""

import json
from typing import Any

import pytest

from halfstep.machine_offer import MachineOffer, RecipeOffer, encode_offer, read_offer, rows
from tests.marks import looped

CPU = {
    "kind": "cpu",
    "index": 0,
    "name": "Xeon",
    "memory_bytes": 2**34,
    "compute_capability": None,
    "fp16": True,
    "bf16": True,
    "tf32": False,
    "fp8": False,
}
#: Recipes as the probe before these classes printed them: offered, lacking packages, and broken.
RECIPES: list[dict[str, Any]] = [
    {
        "name": "mine",
        "reference": "/r/mine.py:Mine",
        "file": "/r/mine.py",
        "title": "Mine",
        "description": "",
        "schema": {"type": "object", "properties": {"lr": {"default": 1e-3, "maximum": 1}}},
        "source": "/r/mine.py",
        "sha256": "ab" * 32,
        "check": None,
    },
    {"name": "big", "reference": "big", "package": "mine 1.0", "needs": "torch 9"},
    {
        "name": "/r/broken.py:B",
        "reference": "/r/broken.py:B",
        "file": "/r/broken.py",
        "error": "ZeroDivisionError: division by zero",
        "place": "broken.py:2",
    },
]
ANSWER: dict[str, Any] = {
    "devices": [CPU],
    "recipes": RECIPES,
    "versions": {"python": "3.11", "cuda": None},
}


def test_an_offer_is_stored_as_before() -> None:
    """Capabilities are stored with the same fields as before, which the server reads."""
    offer = read_offer(json.dumps(ANSWER))
    assert rows(offer.devices) == [CPU]
    assert rows(offer.recipes) == RECIPES
    assert [each.is_offered for each in offer.recipes] == [True, False, False]
    assert json.loads(encode_offer(offer)) == ANSWER


def test_a_recipe_that_cannot_be_read_costs_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    """An unreadable recipe is logged with field and value, and the others are offered."""
    bad = [{**RECIPES[0], "name": "odd", "title": 7}, {"reference": "nameless"}]
    offer = read_offer(json.dumps(ANSWER | {"recipes": [*bad, *RECIPES]}))
    assert rows(offer.recipes) == RECIPES
    assert [record.getMessage() for record in caplog.records] == [
        "recipe 'odd' is not offered: title is 7; allowed: text",
        "recipe None is not offered: name is missing",
    ]


@looped("text", ["", "{", "7", '{"devices": []}', json.dumps({"devices": [7]})])
def test_an_offer_that_cannot_be_read_is_an_error(text: str) -> None:
    """Capabilities with unreadable devices are an error, since such a machine can train nothing."""
    with pytest.raises(ValueError, match="the machine's offer is damaged"):
        read_offer(text)


def test_an_empty_offer_has_neither_devices_nor_recipes() -> None:
    """A worker without a probe has no devices and recipes."""
    assert rows(MachineOffer().recipes) == []
    assert not RecipeOffer(name="x", reference="x").is_offered
