"""Events with names of versions before 0.1.0 are read as current ones."""

import json
from typing import Any

import pytest

from halfstep.telemetry import event_codec as codec
from halfstep.telemetry.plain_json import json_safe
from tests.halfstep.telemetry.events_made import HONEST


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("spike", {"rolled_back_to": "rewound_to"}),
        ("rolled_back", {"rollbacks": "rewinds"}),
        ("weights", {"mismatched": "misshapen", "mismatched_count": "misshapen_count"}),
    ],
)
def test_earlier_names_are_read(kind: str, names: dict[str, str]) -> None:
    """Each event of an earlier name has the fields of the current one."""
    event: dict[str, Any] = HONEST[kind] | ({"rolled_back_to": 3} if kind == "spike" else {})
    before = {names.get(name, name): value for name, value in event.items()}
    before["event"] = {"rolled_back": "rewound"}.get(kind, kind)
    assert codec.fields_of(codec.decode(json.dumps(before).encode())) == json_safe(event)


def test_a_name_of_a_user_stays() -> None:
    """A user's metric with the earlier name of an event keeps its name."""
    metric = HONEST["metric"] | {"name": "rewound"}
    assert codec.fields_of(codec.decode(json.dumps(metric).encode())) == metric
