"""Names that events had before 0.1.0, in spools of the same version."""

import re

from halfstep.telemetry.plain_json import JsonObject

#: In the bytes of an event that may have one of them.
NAMES = re.compile(rb'"(rewound|misshapen)')
_KINDS = {"rewound": "rolled_back"}
#: By kind.
_FIELDS = {
    "spike": {"rewound_to": "rolled_back_to"},
    "rewound": {"rewinds": "rollbacks"},
    "weights": {"misshapen": "mismatched", "misshapen_count": "mismatched_count"},
}


def rename(fields: JsonObject) -> JsonObject:
    """Return an event's fields with their names of today."""
    kind = fields.get("event")
    if not isinstance(kind, str) or kind not in _FIELDS:
        return fields
    names = _FIELDS[kind]
    event = {names.get(name, name): value for name, value in fields.items()}
    return event | {"event": _KINDS.get(kind, kind)}
