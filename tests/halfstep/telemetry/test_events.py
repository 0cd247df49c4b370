"""Events of the spool, through writer and reader."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfstep.telemetry import event_codec as codec
from halfstep.telemetry import events
from halfstep.telemetry.event_codec import BadEvent
from halfstep.telemetry.plain_json import json_safe
from halfstep.telemetry.spool import (
    STEP_DTYPE,
    STEPS,
    TIMED_STEPS,
    UNKNOWN_US,
    SpoolReader,
    SpoolWriter,
    Unrecordable,
)
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_module,
)
from tests.halfstep.telemetry.events_made import HONEST, STATE
from tests.spool_made import event_of, fields_of, spool_anything, spool_raw


def test_every_kind_of_event_has_a_table_and_passes(tmp_path: Path) -> None:
    """Each kind of event that trainings write is read back unchanged."""
    assert HONEST.keys() == events.KINDS.keys()
    with SpoolWriter(tmp_path, 1) as writer:
        for event in (*HONEST.values(), *make_events([4])):
            writer.event(event_of(event))
    assert not [each for each in SpoolReader(tmp_path).poll() if isinstance(each, Unrecordable)]


REFUSED = [
    ("metric", {"value": "warm-up"}, "'val/accuracy' at step 3: value is 'warm-up'; allowed: a nu"),
    ("metric", {"value": None}, "value is None; allowed: a number"),
    ("metric", {"value": [0.5]}, "value is [0.5]; allowed: a number"),
    ("metric", {"value": 10**400}, "allowed: a number"),
    ("metric", {"name": 7}, "name is 7; allowed: text"),
    ("metric", {"name": "a\0b"}, "without NUL"),
    ("metric", {"name": "a\ud800"}, "without NUL and lone surrogates"),
    ("metric", {"name": "x" * 3000}, "of 1 to 200 characters"),
    ("metric", {"step": 2**63}, f"step is {2**63}; allowed: a whole number from 0 to {2**53}"),
    ("metric", {"step": True}, "step is True"),
    ("scaler", {"kind": "jump"}, "kind is 'jump'; allowed: one of skip, growth, backoff, set"),
    (
        "scaler",
        {"scale_before": float("nan")},
        "scale_before is 'NaN'; allowed: a number that is no",
    ),
    ("scaler", {"culprits": [{"name": "w", "inf": -1, "nan": 0}]}, "culprits.0.inf is -1"),
    ("checkpoint", {"request": 2**31}, f"request is {2**31}; allowed: a whole number from 1 to"),
    ("checkpoint", {"stall_seconds": "NaN"}, "stall_seconds is 'NaN'; allowed: a number from 0"),
    ("checkpoint", {"write_seconds": -0.1}, "write_seconds is -0.1; allowed: a number from 0"),
    ("checkpoint", {"files": [{**STATE, "path": "../a.pt"}]}, "path is '../a.pt'; allowed: a file"),
    ("artifact", {"path": "../../halfstep.db"}, "path is '../../halfstep.db'; allowed: a file"),
    ("artifact", {"path": "artifacts/../job-1.json"}, "folder artifacts"),
    ("artifact", {"path": "/etc/passwd"}, "path is '/etc/passwd'"),
    ("artifact", {"sha256": 'ab"\r\nX: y'}, "allowed: 64 hexadecimal digits"),
    ("saved_artifact", {"name": "../digits"}, "name is '../digits'; allowed: 1 to 128"),
    ("saved_artifact", {"aliases": ["v3"]}, "aliases.0 is 'v3'; allowed: 1 to 64 letters"),
    ("saved_artifact", {"files": []}, "files is []; allowed: 1 to 10000 files"),
    ("used_artifact", {"digest": "abc"}, "allowed: 64 hexadecimal digits"),
    ("artifact", {"name": "../a.txt"}, "name is '../a.txt'; allowed: a plain file name"),
    ("histogram", {"modules": [make_module("w", 10**18, [1])]}, "modules.0.lowest_exponent is 10"),
    ("histogram", {"modules": [make_module("w", 0, [-1])]}, "modules.0.counts.0 is -1"),
    ("replay", {"direction": "sideways"}, "direction is 'sideways'; allowed: one of forward, back"),
    ("obeyed", {"request": "1; DROP"}, "request is '1; DROP'"),
    ("resumed", {"notes": "all"}, "notes is 'all'; allowed: a list"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_what_cannot_be_recorded_is_neither_written_nor_read(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    """An invalid event is refused by the writer and skipped by the reader, with its field."""
    event = HONEST[kind] | changes
    fields = {name: value for name, value in event.items() if name != "event"}
    with SpoolWriter(tmp_path, 1) as writer, pytest.raises(BadEvent) as caught:
        writer.event(events.KINDS[kind](**fields))
    assert message in str(caught.value)
    spool_anything(tmp_path, 1, event, HONEST["metric"])
    wrong, fine = SpoolReader(tmp_path).poll()
    assert isinstance(wrong, Unrecordable)
    assert wrong.problem.startswith(kind)
    assert fields_of(fine) == HONEST["metric"]


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    """An event without a required field is refused by its name."""
    with SpoolWriter(tmp_path, 1) as writer, pytest.raises(BadEvent, match="share is missing"):
        writer.event(event_of({"event": "shapes", "step": 0}))


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    """An event of a later version is recorded with its known fields."""
    spool_anything(tmp_path, 1, HONEST["metric"] | {"further": {"deep": 2**64}})
    [metric] = SpoolReader(tmp_path).poll()
    assert fields_of(metric) == HONEST["metric"]


def test_a_spool_of_an_earlier_version_is_read() -> None:
    """Events and steps that the version before the typed events wrote are read unchanged.

    Its writer used json.dumps, with every kind of event, then timed and untimed steps.
    """
    items = SpoolReader(Path(__file__).parent / "spools" / "before-structs").poll()
    assert not [item for item in items if isinstance(item, Unrecordable)]
    later = {"precision_diff", "precision_plan", "saved_artifact", "used_artifact"}
    later |= {"unscaled_loss", "call_order", "outside_optimizers", "shadow_step"}
    later |= {"described", "alert", "gradients_dropped", "mixed_scales"}
    later |= {"scaler_left_behind", "rounded_state"}
    written = [
        *(event for kind, event in HONEST.items() if kind not in later),
        *(each | {"loss_nonfinite": False} for each in make_events([4])),
        HONEST["checkpoint"] | {"upload": True},
    ]
    read = [codec.fields_of(item) for item in items if isinstance(item, events.Event)]
    assert read == json_safe(written)
    timed, untimed = (item for item in items if isinstance(item, np.ndarray))
    assert np.array_equal(timed["loss"], np.float32([0.5, 0.25, np.nan]), equal_nan=True)
    assert untimed["data_us"].tolist() == [UNKNOWN_US] * 3


def test_fields_survive_a_spool(tmp_path: Path) -> None:
    """Fields of every kind of event are read back as written, and absent ones as absent."""
    with SpoolWriter(tmp_path, 1) as writer:
        for event in HONEST.values():
            writer.event(event_of(event))
    read = [codec.fields_of(each) for each in SpoolReader(tmp_path).poll()]  # type: ignore[arg-type]
    assert read == json_safe([*HONEST.values()])


@pytest.mark.parametrize("payload", [b'{"value": NaN}', b'{"value": 1e999}', b'{"value": -1E999}'])
def test_numbers_beyond_json_are_read(tmp_path: Path, payload: bytes) -> None:
    """NaN and 1e999, which Python's json module writes and reads, are still accepted."""
    rest = json.dumps({k: v for k, v in HONEST["metric"].items() if k != "value"}).encode()
    spool_raw(tmp_path, 1, rest[:-1] + b", " + payload[1:])
    [metric] = SpoolReader(tmp_path).poll()
    assert isinstance(metric, events.Metric)
    assert not math.isfinite(float(metric.value))


def test_numpys_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    """NumPy floats, and infinite numbers next to None, survive a spool."""
    with SpoolWriter(tmp_path, 1) as writer:
        writer.event(events.Metric(step=1, name="a", value=np.float64(0.5), elapsed_ms=0))
        module = events.HeadroomModule(name="head", activation=float("inf"), gradient=None)
        writer.event(events.Headroom(step=1, scale=8.0, modules=[module]))
    metric, headroom = (fields_of(each) for each in SpoolReader(tmp_path).poll())
    assert metric["value"] == 0.5
    assert headroom["modules"] == [{"name": "head", "activation": "Infinity", "gradient": None}]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'"skip"',
        b"\xff",
        b"[" * 9000,
        b"1" * 5000,
        b'{"event": ["metric"]}',
    ],
)
def test_a_frame_that_is_no_event_is_set_apart(tmp_path: Path, payload: bytes) -> None:
    """A frame that is no event, in JSON or not, is skipped, and the next one is read."""
    spool_raw(tmp_path, 1, payload)
    spool_anything(tmp_path, 1, HONEST["metric"])
    wrong, fine = SpoolReader(tmp_path).poll()
    assert isinstance(wrong, Unrecordable)
    assert wrong.payload == payload
    assert fields_of(fine) == HONEST["metric"]


def test_a_frame_of_steps_is_whole_records_within_bounds(tmp_path: Path) -> None:
    """Frames with steps out of range, partial records or unknown kinds are rejected."""
    records = np.zeros(2, STEP_DTYPE)
    records["step"] = 1, -5
    spool_raw(tmp_path, 1, records.tobytes(), kind=TIMED_STEPS)
    spool_raw(tmp_path, 1, b"half", kind=STEPS)
    spool_raw(tmp_path, 1, b"", kind=9)
    faults = [
        each.problem for each in SpoolReader(tmp_path).poll() if isinstance(each, Unrecordable)
    ]
    assert faults[0] == f"steps: step is -5; allowed: a whole number from 1 to {2**53}"
    assert [each.split(";")[0] for each in faults[1:]] == [
        "a frame of kind 1 has 4 bytes",
        "a frame of kind 9 has 0 bytes",
    ]
