"""A ring of rows with values that are too large for a row, or with interrupted copies."""

import math
from typing import Any

import pytest
import torch

from halfstep.clock import clock
from halfstep.monitor.ring import EAGER_ROWS, MOST_EAGER, RING_ROWS, Ring


def test_a_number_beyond_fp32_becomes_infinite() -> None:
    """Nothing raises, and the row's other numbers are unchanged."""
    found: list[list[float]] = []
    ring = Ring(
        3, 3, torch.device("cpu"), clock(), lambda _first, rows, _: found.extend(rows.tolist())
    )
    for values in ([0.5, 1e39, -1e39], [0.25, 2.0, math.nan]):
        ring.values = values
        ring.close(1, 0.0, 0.1)
    assert ring.drain()
    assert found[0] == [0.5, math.inf, -math.inf]
    assert found[1][:2] == [0.25, 2.0]
    assert math.isnan(found[1][2])


def test_rows_arrive_once_and_in_order_round_after_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own step and numbers as fp32, whichever method wrote it."""
    monkeypatch.setattr("halfstep.monitor.ring.DRAIN_SECONDS", math.inf)
    found: list[tuple[int, int, list[float]]] = []

    def take(first: int, rows: Any, records: Any) -> None:
        numbered = range(first, first + len(rows))
        found.extend(zip(numbered, records["step"].tolist(), rows.tolist(), strict=True))

    ring = Ring(2, 2, torch.device("cpu"), clock(), take)
    written = [(step / 7, 3e38 * step) for step in range(3 * RING_ROWS)]
    for step, values in enumerate(written):
        if not ring.append((step, clock(), 0.1, 0.01, -1), values):
            ring.values = values
            ring.close(step, 0.0, 0.1)
        if step % 300 == 0:
            assert ring.drain()
    assert ring.drain()
    numbers = torch.tensor(written, dtype=torch.float64).to(torch.float32).tolist()
    assert found == [(step, step, values) for step, values in enumerate(numbers)]


def test_a_devices_first_rows_and_those_after_a_skip_arrive_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is to be examined in the next steps is known in time; later rows wait."""
    monkeypatch.setattr("halfstep.monitor.ring.DRAIN_SECONDS", math.inf)
    handed: list[int] = []
    ring = Ring(
        1, 1, torch.device("cpu"), clock(), lambda _first, rows, _: handed.append(len(rows))
    )
    ring.is_on_host = False
    for step in range(EAGER_ROWS):
        ring.row.fill_(step)
        ring.close(step, 0.0, 0.1)
    soon = len(handed)
    assert sum(handed) == EAGER_ROWS - 2  # the newest waits for the next, and so does the last
    assert set(handed[1:]) == {1}
    for step in range(10):
        ring.close(step, 0.0, 0.1)
    assert len(handed) == soon
    ring.hurry()
    ring.close(0, 0.0, 0.1)
    assert sum(handed) == ring.number - 1
    for _ in range(MOST_EAGER):
        ring.hurry()
        ring.close(0, 0.0, 0.1)
    assert ring.number - sum(handed) > 0  # a loop that skips for ever is not held up for ever


@pytest.mark.parametrize("place", ["_slices", "np.fromiter"])
def test_rows_interrupted_by_ctrl_c_are_flushed_later(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Each once, with its own step."""
    found: list[tuple[float, int]] = []

    def take(_first: int, rows: Any, records: Any) -> None:
        found.extend(zip(rows[:, 0].tolist(), records["step"].tolist(), strict=True))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    ring = Ring(1, 1, torch.device("cpu"), clock(), take)
    for step in (1, 2, 3):
        ring.values = [float(step)]
        ring.close(step, 0.0, 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(f"halfstep.monitor.ring.{place}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ring.drain()
    ring.values = [4.0]
    ring.close(4, 0.0, 0.1)
    assert ring.drain()
    assert found == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
