"""Conversion of configuration values, each one separately."""

import argparse
import dataclasses
import datetime
import enum
import math
import pathlib
import types
from collections import OrderedDict, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import attrs
import numpy as np
import pydantic
import pytest
import torch
from omegaconf import OmegaConf

from halfstep.session.config_values import MAX_ENTRIES, MAX_ITEMS, MAX_LINES, as_config
from halfstep.telemetry.event_codec import CONFIG_CHARACTERS
from tests.marks import looped
from tests.spool_made import event_of


class Kind(enum.Enum):
    ADAM = "adam"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    A = "a"


@dataclasses.dataclass
class Part:
    a: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any = dataclasses.field(default_factory=lambda: np.float32(0.1))


@attrs.define
class Attrs:
    a: int = 1


class Model(pydantic.BaseModel):
    a: Part = Part()
    secret: pydantic.SecretStr = pydantic.SecretStr("hidden")


class Loose(pydantic.BaseModel, extra="allow"):
    a: int = 1


Point = namedtuple("Point", "x y")

VALUES: list[tuple[Any, Any]] = [
    (np.int64(64), 64),
    (np.uint8(64), 64),
    (np.float32(0.1), 0.1),
    (np.float16(0.1), 0.1),
    (np.float64(0.1), 0.1),
    (np.longdouble(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array(2.5), 2.5),
    (np.array(2), 2),
    (np.array([0.9, 0.999]), [0.9, 0.999]),
    (np.array([[1, 2]], np.int8), [[1, 2]]),
    (np.array(["a"]), ["a"]),
    (torch.tensor(2.5), 2.5),
    (torch.tensor(0.1), 0.1),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(3), 3),
    (torch.tensor(True), True),
    (torch.tensor([1.5, 2.0]), [1.5, 2.0]),
    (torch.nn.Parameter(torch.tensor(0.25)), 0.25),
    (Kind.ADAM, "adam"),
    (Kind.PAIR, "PAIR"),
    (Level.HIGH, 3),
    (Word.A, "a"),
    (pathlib.Path("out/run"), "out/run"),
    (pathlib.Path("caf\udce9"), "caf\\udce9"),
    ("caf\udce9.txt\0", "caf\\udce9.txt\\x00"),
    (b"raw\xff", "raw\\xff"),
    (torch.float16, "torch.float16"),
    (torch.device("cpu"), "cpu"),
    (torch.Size([1, 2]), [1, 2]),
    (np.dtype("float32"), "float32"),
    (np.float32, "numpy.float32"),
    (len, "len"),
    (torch.nn.ReLU, "torch.nn.modules.activation.ReLU"),
    ((1, 2), [1, 2]),
    ({3, 1}, [1, 3]),
    (range(3), [0, 1, 2]),
    (Part(), {"a": 1}),
    (Slotted(), {"a": 0.1}),
    (Attrs(), {"a": 1}),
    (Model(), {"a": {"a": 1}, "secret": "**********"}),
    (Loose(b=2), {"a": 1, "b": 2}),
    (Point(1, 2), {"x": 1, "y": 2}),
    (argparse.Namespace(x=1, y=None), {"x": 1, "y": None}),
    (types.SimpleNamespace(x=1), {"x": 1}),
    (OrderedDict(a={1: 2}), {"a": {"1": 2}}),
    (Fraction(1, 4), 0.25),
    (Decimal("0.1"), 0.1),
    (datetime.date(2026, 11, 1), "2026-11-01"),
    (2**60, str(2**60)),
    (float("inf"), math.inf),
    (1 + 2j, "(1+2j)"),
    (torch.tensor(1 + 2j), "(1+2j)"),
    (torch.tensor([1 + 2j]).conj(), ["(1-2j)"]),
    (np.array("a"), "a"),
    (np.array({"a": 1}, dtype=object), {"a": 1}),
    (torch, "torch"),
]


@looped("value, expected", VALUES)
def test_a_value_is_converted_without_a_loss(value: Any, expected: Any) -> None:
    """Configuration values at any depth become Python numbers at full precision."""
    losses: list[str] = []
    found = as_config({"a": value, "b": [value]}, losses.append)
    assert found == {"a": expected, "b": [expected]}
    assert type(found["a"]) is type(expected)
    assert losses == []


class Raising:
    """An object that raises on every access."""

    x = property(lambda self: 1 / 0)

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class RaisingMapping(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        if key == "bad":
            raise KeyError(key)
        return super().__getitem__(key)


def _cycle() -> dict[str, Any]:
    cycle: dict[str, Any] = {"ok": 1}
    cycle["self"] = cycle
    return cycle


def _deep(levels: int) -> Any:
    deep: Any = 1
    for _ in range(levels):
        deep = {"a": deep}
    return deep


def _tree(levels: int) -> Any:
    """Return nested lists whose elements are the same object."""
    tree: Any = 1
    for _ in range(levels):
        tree = [tree] * 3
    return tree


def _entries(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(inner) + sum(map(_entries, inner))


def _objects(levels: int) -> Any:
    """Return a tree of objects, as in a trainer or a dataset."""
    children = {f"a{i}": _objects(levels - 1) if levels else 1 for i in range(6)}
    return types.SimpleNamespace(**children)


def _namespace(value: Any) -> Any:
    return types.SimpleNamespace(ok=1, bad=value)


BAD = {
    "cycle": _cycle(),
    "deep": _deep(5000),
    "raises": Raising(),
    "mapping": RaisingMapping(bad=1, ok=1),
    "long text": "a" * 10**6,
    "long list": list(range(10**6)),
    "range": range(10**12),
    "large array": np.zeros(10**6),
    "large tensor": torch.zeros(100, 100, 100),
    "meta tensor": torch.zeros((), device="meta"),
    "many": {str(i): "a" * 100 for i in range(5000)},
    "nested": _namespace(Raising()),
    "self-list": [],
}
BAD["self-list"].append(BAD["self-list"])  # type: ignore[attr-defined]


@looped("name", BAD)
def test_a_bad_value_costs_that_value_only(name: str) -> None:
    """An invalid configuration value is noted in one line, and the others are recorded."""
    losses: list[str] = []
    found = as_config({"lr": 0.1, "bad": BAD[name], "bs": np.int64(8)}, losses.append)
    assert (found["lr"], found["bs"]) == (0.1, 8)
    assert losses
    assert all(line.startswith("config: bad") and "\n" not in line for line in losses)
    assert event_of({"event": "configured", "config": found})


def test_a_cycle_and_a_mapping_keep_their_other_entries() -> None:
    """A cyclic or unreadable entry is replaced by a note, and the others are kept."""
    assert as_config(_cycle()) == {"ok": 1, "self": "(a cycle: it contains itself)"}
    found = as_config(BAD["mapping"])
    assert found["ok"] == 1
    assert found["bad"].startswith("(unreadable: KeyError")
    shared = {"a": 1}
    assert as_config({"x": shared, "y": shared}) == {"x": {"a": 1}, "y": {"a": 1}}


@pytest.mark.parametrize("name", ["large tensor", "large array", "meta tensor"])
def test_an_array_that_is_large_or_on_a_device_is_not_read(name: str) -> None:
    """A large array, or one on a device, is replaced by its type, shape and device, in one line."""
    lines: list[str] = []
    found = as_config({"bad": BAD[name]}, lines.append)["bad"]
    value = BAD[name]
    assert str(value.dtype) in found
    assert str(tuple(value.shape)) in found
    assert found.endswith("on meta)" if name == "meta tensor" else "on the CPU)")
    assert len(lines) == 1


class Unreadable(torch.Tensor):
    """A tensor that acts as on a device and raises when its numbers are read."""

    device = torch.device("cuda")  # type: ignore[assignment]

    def _read(self, *_: Any) -> Any:
        pytest.fail("it was read")

    cpu = item = tolist = numpy = to = __getitem__ = __float__ = __repr__ = _read  # type: ignore[assignment]


@looped("shape", [(), (1,), (3, 4), (1000, 1000)])
def test_a_tensor_of_a_device_is_never_read(shape: tuple[int, ...]) -> None:
    """A device tensor of any size is not read, because that would wait for the device."""
    value = torch.Tensor._make_subclass(Unreadable, torch.zeros(shape))
    found = as_config({"lr": 0.1, "bad": value, "list": [value]})
    note = f"(a tensor of torch.float32, shape {shape}, on cuda)"
    assert found == {"lr": 0.1, "bad": note, "list": [note]}


@looped(
    "bad",
    [
        [[list(range(100)) for _ in range(100)] for _ in range(100)],
        [{"a": [Raising()] * 1000}] * 1000,
        _tree(12),
        _objects(4),
    ],
)
def test_all_entries_together_are_bounded(bad: Any) -> None:
    """The total of entries is bounded, outer levels first, and a few lines report the rest."""
    lines: list[str] = []
    good = {"lr": 0.1, "optimizer": {"betas": [0.9, 0.999]}, "sizes": list(range(200))}
    found = as_config({"bad": bad} | good, lines.append)
    assert {name: found[name] for name in good} == good
    assert _entries(found) <= MAX_ENTRIES * 2  # a note for each that is left out
    assert 1 <= len(lines) <= MAX_LINES


def test_missing_and_unresolvable_values_of_omegaconf_are_marked() -> None:
    """OmegaConf interpolations are resolved, missing values are marked, and none is lost."""
    config = OmegaConf.create(
        {
            "lr": 0.1,
            "copy": "${lr}",
            "missing": "???",
            "broken": "${nowhere}",
            "list": [1, "???", "${lr}", {"a": "${nowhere}"}],
            "none": None,
        }
    )
    losses: list[str] = []
    found = as_config(config, losses.append)
    assert (found["lr"], found["copy"], found["missing"], found["none"]) == (0.1, 0.1, "???", None)
    assert found["broken"].startswith("(unreadable: InterpolationKeyError")
    assert found["list"][:3] == [1, "???", 0.1]
    assert found["list"][3]["a"].startswith("(unreadable")
    assert len(losses) == 4


def test_long_values_are_truncated() -> None:
    """A long list is cut, and a configuration that is too large loses its largest values."""
    assert len(as_config({"a": list(range(10**5))})["a"]) == MAX_ITEMS + 1
    found = as_config({str(i): ["x" * 1900] * 10 for i in range(20)} | {"lr": 1})
    assert found["lr"] == 1
    assert len(str(found)) <= CONFIG_CHARACTERS
