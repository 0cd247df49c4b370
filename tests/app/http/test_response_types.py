"""The client's types of responses, compared with the server's schemas."""

from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from fastapi.testclient import TestClient

from halfstep.api_client import response_types


def test_each_type_has_the_fields_of_its_schema(browser: TestClient) -> None:
    """With the same names; one that may be null, or that is a list, is so in both."""
    schemas = browser.get("/api/v1/openapi.json").json()["components"]["schemas"]
    types = {name: each for name, each in vars(response_types).items() if is_typeddict(each)}
    assert {"RunSummary", "SweepDetail", "Event"} <= types.keys() <= schemas.keys()
    for name, declared in types.items():
        properties = schemas[name]["properties"]
        hints = get_type_hints(declared)
        assert hints.keys() == properties.keys(), name
        for field, rule in properties.items():
            members = get_args(hints[field]) if NoneType in get_args(hints[field]) else ()
            kinds = {each.get("type") for each in rule.get("anyOf", [rule])}
            assert (NoneType in members) == ("null" in kinds), f"{name}.{field}"
            is_list = any(get_origin(each) is list for each in members or (hints[field],))
            assert is_list == ("array" in kinds), f"{name}.{field}"
            assert _is_text(members or (hints[field],)) or kinds != {"string"}, f"{name}.{field}"


def _is_text(members: tuple[Any, ...]) -> bool:
    """Return whether a type is text, or one of a few texts."""
    words = [get_args(each) for each in members if get_origin(each) is Literal]
    texts = all(isinstance(word, str) for each in words for word in each)
    return texts and len(words) + members.count(str) == len(members)
