"""Formats of a checkpoint's state: this version writes the newest, and reads all.

| format | since | |
| --- | --- | --- |
| 1, 2 | | whole, and with shards; before 0.1.0 some parts and settings had other names |
| 3 | after 0.1.0 | has the key `shards` if its tensors are in a folder |
"""

from typing import Any

FORMAT = 3
#: Settings of `spike` and its values, by their names in the earliest versions of format 1.
_SPIKE = {
    "rewind": "rollback",
    "most_rewinds": "max_rollbacks",
    "look_every_steps": "check_every_steps",
}
_AFTERWARDS = {"go on": "continue"}


class FormatError(ValueError):
    """A state that is no checkpoint, or of a newer version; the message has both formats."""


def convert(state: Any) -> dict[str, object]:
    """Return a state in the format of this version. Raises FormatError."""
    number = state.get("format") if isinstance(state, dict) else None
    if not isinstance(number, int) or number < 1:
        raise FormatError("is not a Halfstep checkpoint")
    if number > FORMAT:
        raise FormatError(
            f"has format {number}; this version reads formats up to {FORMAT}: update Halfstep"
        )
    if number == FORMAT:
        return dict(state)
    parts, config = dict(state["parts"]), dict(state["config"])
    if "rewinds" in parts.get("spikes", {}):
        parts["spikes"] = dict(parts["spikes"])
        parts["spikes"]["rollbacks"] = parts["spikes"].pop("rewinds")
    if "spike" in config:
        spike = {_SPIKE.get(name, name): value for name, value in config["spike"].items()}
        if spike.get("afterwards") in _AFTERWARDS:
            spike["afterwards"] = _AFTERWARDS[spike["afterwards"]]
        config["spike"] = spike
    return {**state, "format": FORMAT, "parts": parts, "config": config}
