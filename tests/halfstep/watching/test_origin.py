"""Traced steps: the statements about a graph that is observed in part."""

import pytest
import torch
from torch import Tensor, nn

from halfstep.evidence import origin
from halfstep.evidence.origin import Origin
from halfstep.telemetry.events import Event
from halfstep.watching.async_host_copy import HostCopies


def _observe(*, is_nan_at_end: bool) -> list[Event]:
    """Back-propagate through a chain with a NaN at its first or last node, in a traced step."""
    events: list[Event] = []
    observed = Origin(events.append, HostCopies())
    x = torch.zeros(3, requires_grad=True)
    observed.check()
    loss = (x.sqrt() * 0).exp().sum() if is_nan_at_end else x.exp().sum()
    observed.arm([loss])
    loss.backward()
    observed.passed()
    observed.end(5, 1.0, 1.0, loss.item())
    observed.report()
    return events


def test_the_first_operation_is_named_where_all_nodes_are_observed() -> None:
    """The root of 0 is the first node whose gradient is not finite."""
    [event] = _observe(is_nan_at_end=True)
    assert (event.kind, event.operation) == ("singular", "SqrtBackward0")


@pytest.mark.parametrize("is_nan_at_end", [True, False])
def test_a_graph_observed_in_part_is_unobserved(
    monkeypatch: pytest.MonkeyPatch, is_nan_at_end: bool
) -> None:
    """Neither an operation is named, which a node before it may have led to, nor another rank."""
    monkeypatch.setattr(origin, "MOST_NODES", 2)
    [event] = _observe(is_nan_at_end=is_nan_at_end)
    assert event.kind == "unobserved"


class _Logarithm(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).log()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_modules_of_any_type_are_observed(dtype: torch.dtype) -> None:
    """fp64 is measured in its own type, and fp8 not at all."""
    events: list[Event] = []
    observed = Origin(events.append, HostCopies())
    net = nn.Sequential(nn.Linear(2, 2).double(), _Logarithm(dtype))
    observed.check()
    loss = net(torch.full((1, 2), 2.0, dtype=torch.float64)).sum()
    observed.arm([loss])
    loss.backward()
    observed.passed()
    observed.end(5, 1.0, 1.0, loss.item())
    observed.report()
    [event] = events
    assert (event.kind, event.module) == ("inside", "_Logarithm")
    assert event.largest_input > 0
