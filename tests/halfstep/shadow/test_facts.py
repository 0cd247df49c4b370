"""Differences between tensors and their shadows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.shadow.facts import examine_all


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of operations that read tensors on the host, each of which waits for a device."""
    names: list[str] = []

    def record(name: str) -> None:
        read = getattr(Tensor, name)

        def read_and_record(tensor: Tensor) -> Any:
            names.append(name)
            return read(tensor)

        monkeypatch.setattr(Tensor, name, read_and_record)

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        record(name)
    return names


def test_healthy_results_of_an_operator_are_read_at_once(reads: list[str]) -> None:
    """A single read shows that an operator's results, with and without shadows, lost nothing."""
    exact = torch.tensor([0.1, 0.0, 3.0])
    pairs = [(exact.half(), exact), (exact, None), (exact.to(torch.complex64), None)]
    assert examine_all([*pairs, (torch.tensor([1, 2]), None)]) == [None] * 4
    assert reads == ["tolist"]


def test_each_lost_element_is_counted() -> None:
    """Infinities, NaN and flushed values are counted in exactly the tensors that have them."""
    exact = torch.tensor([1e6, 1e-9, 1.0, torch.nan])
    healthy, lost, alone = examine_all(
        [(exact[2:3].half(), exact[2:3]), (exact.half(), exact), (exact, None)]
    )
    assert healthy is None
    assert lost is not None
    assert (lost.infinite, lost.nan, lost.shadow_nan, lost.lost, lost.flushed) == (1, 1, 1, 1, 1)
    assert lost.largest == 1e6
    assert lost.smallest == pytest.approx(1e-9)
    assert alone is not None
    assert (alone.nan, alone.shadow_nan, alone.infinite) == (1, 1, 0)
