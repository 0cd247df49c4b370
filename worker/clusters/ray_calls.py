"""Calls of worker.clusters.ray to its driver, one JSON object per line, and their answers."""

from typing import Any, TypeAlias

from msgspec import UNSET, Struct, UnsetType


class PilotsCall(Struct, frozen=True, kw_only=True, tag_field="call"):
    """A call about the pilots of a run."""

    name: str  # prefix of the names of its actors
    nodes: int


class Place(PilotsCall, frozen=True, kw_only=True, tag="place"):
    """Create the placement group and the actors that do not exist yet; answer: None."""

    devices: int  # per node
    command: list[str]


class Poll(PilotsCall, frozen=True, kw_only=True, tag="poll"):
    """Return their PilotStatus."""

    devices: int  # per node


class Cancel(PilotsCall, frozen=True, kw_only=True, tag="cancel"):
    """End the run's workers; answer: None."""


class Log(PilotsCall, frozen=True, kw_only=True, tag="log"):
    """Return the end of the workers' output as a text."""


class Devices(Struct, frozen=True, tag_field="call", tag="devices"):
    """Return the number of devices of each node that is up, a list of floats."""


class Check(Struct, frozen=True, tag_field="call", tag="check"):
    """Run a command on a node with a free device; return its output lines."""

    command: list[str]


Call: TypeAlias = Place | Poll | Cancel | Log | Devices | Check


class Answer(Struct, frozen=True):
    """Answer to a call: its value, or why it failed."""

    value: Any = None
    error: str | UnsetType = UNSET
