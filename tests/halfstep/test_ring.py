"""A ring of rows whose host is interrupted."""

import numpy as np
import pytest
import torch

from halfstep.clock import clock
from halfstep.ring import Ring


class Interrupting:
    """A number in whose reading somebody types Ctrl-C, once."""

    is_typed = False

    def __float__(self) -> float:
        if not self.is_typed:
            self.is_typed = True
            raise KeyboardInterrupt
        return 2.0


def test_a_row_that_an_interrupt_broke_off_shifts_no_other() -> None:
    """Each is handed over once, with its own step, by whoever goes on."""
    found: list[tuple[float, int]] = []

    def take(_first: int, rows: np.ndarray, records: np.ndarray) -> None:
        found.extend(zip(rows[:, 0].tolist(), records["step"].tolist(), strict=True))

    ring = Ring(1, 1, torch.device("cpu"), clock(), take)
    for step, value in enumerate((1.0, Interrupting(), 3.0), 1):
        ring.values = [value]
        ring.close(step, 0.0, 0.1)
    with pytest.raises(KeyboardInterrupt):
        ring.drain()
    ring.values = [4.0]
    ring.close(4, 0.0, 0.1)
    assert ring.drain()
    assert found == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
