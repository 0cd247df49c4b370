"""A ring of rows whose host is interrupted."""

from typing import Any

import pytest
import torch

from halfstep.clock import clock
from halfstep.ring import Ring


def test_rows_whose_way_a_ctrl_c_broke_off_are_handed_over_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each once, with its own step, by whoever goes on."""
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
        patched.setattr("halfstep.ring._joined", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ring.drain()
    ring.values = [4.0]
    ring.close(4, 0.0, 0.1)
    assert ring.drain()
    assert found == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
