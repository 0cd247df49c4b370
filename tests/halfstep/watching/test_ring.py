"""A ring of rows: when they are delivered, and interrupted copies."""

import math
from typing import Any

import pytest
import torch

from halfstep.clock import clock
from halfstep.recording.ring import EAGER_ROWS, MOST_EAGER, RING_ROWS, Ring

CPU = torch.device("cpu")


def close(ring: Ring, step: int, value: float = 0.0) -> None:
    """Write and close a row, and deliver due rows."""
    ring.row.fill_(value)
    if (until := ring.close(step, 0.1, 0.01)) is not None:
        ring.send(until)


def drain(ring: Ring) -> bool:
    """Deliver the rest; return whether all rows have arrived."""
    ring.send(ring.number)
    return ring.wait()


def test_rows_arrive_once_and_in_order_round_after_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row arrives once with its own step and numbers."""
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", math.inf)
    found: list[tuple[int, int, list[float]]] = []

    def take(first: int, rows: Any, records: Any) -> None:
        numbered = range(first, first + len(rows))
        found.extend(zip(numbered, records["step"].tolist(), rows.tolist(), strict=True))

    ring = Ring(2, CPU, clock(), take)
    for step in range(3 * RING_ROWS):
        close(ring, step, step / 8)
        if step % 300 == 0:
            assert drain(ring)
    assert drain(ring)
    assert found == [(step, step, [step / 8] * 2) for step in range(3 * RING_ROWS)]


def test_a_devices_first_rows_and_those_after_a_skip_arrive_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device's first rows, and those after a skip, arrive within a few steps; later rows wait."""
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", math.inf)
    monkeypatch.setattr("halfstep.recording.ring.EAGER_SHARE", math.inf)
    handed: list[int] = []
    ring = Ring(1, CPU, clock(), lambda _first, rows, _: handed.append(len(rows)))
    ring.readable = None
    for step in range(EAGER_ROWS):
        close(ring, step)
    soon = len(handed)
    assert sum(handed) == EAGER_ROWS - 2  # the newest waits for the next, and so does the last
    assert set(handed) == {1}
    for step in range(10):
        close(ring, step)
    assert len(handed) == soon
    ring.hurry()
    close(ring, 0)
    assert sum(handed) == ring.number - 1
    for _ in range(MOST_EAGER):
        ring.hurry()
        close(ring, 0)
    assert ring.number - sum(handed) > 0  # a loop that skips for ever is not held up for ever


def test_handing_over_soon_takes_a_bounded_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Delivering a short loop's first rows early takes at most a tenth of its time."""
    now = [0.0]
    monkeypatch.setattr("halfstep.recording.ring.clock", lambda: now[0])
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", math.inf)
    handed: list[int] = []

    def take(_first: int, rows: Any, _records: Any) -> None:
        handed.append(len(rows))
        now[0] += 2.0

    ring = Ring(1, CPU, clock(), take)
    ring.readable = None
    for step in range(EAGER_ROWS):
        now[0] += 1.0
        close(ring, step)
    spent = 2.0 * len(handed)
    assert 1 < spent <= 0.1 * now[0] + 2.0


@pytest.mark.parametrize("place", ["_slices", "np.fromiter"])
def test_rows_interrupted_by_ctrl_c_are_flushed_later(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Rows interrupted by Ctrl-C are delivered later, once, with their own step."""
    found: list[tuple[float, int]] = []

    def take(_first: int, rows: Any, records: Any) -> None:
        found.extend(zip(rows[:, 0].tolist(), records["step"].tolist(), strict=True))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ring = Ring(1, CPU, clock(), take)
    for step in (1, 2, 3):
        close(ring, step, float(step))
    with monkeypatch.context() as patched:
        patched.setattr(f"halfstep.recording.ring.{place}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drain(ring)
    close(ring, 4, 4.0)
    assert drain(ring)
    assert found == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
