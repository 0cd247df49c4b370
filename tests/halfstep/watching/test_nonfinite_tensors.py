"""The search for nonfinite buffers and weights."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.evidence.nonfinite_tensors import search
from halfstep.watching.async_host_copy import HostCopies
from tests.halfstep.watching.watch_made import Written


def found(*tensors: tuple[str, Tensor]) -> list[list[str]]:
    """Return the result of a search."""
    reports: list[list[str]] = []
    host_copies = HostCopies()
    search(tensors, host_copies, reports.append)
    host_copies.report(wait=True)
    return reports


def test_each_type_of_floating_point_is_searched() -> None:
    """One search covers all floating-point types, graph tensors, and two of one name."""
    bad = torch.tensor([1.0, math.nan])
    tensors = [
        ("finite", torch.ones(2)),
        ("half", bad.half()),
        ("bfloat16", bad.bfloat16()),
        ("double", torch.tensor(-math.inf, dtype=torch.float64)),
        ("with graph", bad.clone().requires_grad_() * 2),
        ("same", torch.ones(2)),
        ("same", bad),
    ]
    assert found(*tensors) == [["half", "bfloat16", "double", "with graph", "same"]]


def test_finite_tensors_are_reported_as_none_found() -> None:
    """A first search reports finite tensors too, to record that nothing is nonfinite by design."""
    assert found(("large", torch.tensor(3e38))) == [[]]


def test_tensors_without_a_norm_are_left_out() -> None:
    """Integers, empty tensors, fp8 and tensors without values are left out; alone they cause no
    search.
    """
    tensors = [
        ("integers", torch.ones(2, dtype=torch.int64)),
        ("empty", torch.ones(0)),
        ("fp8", torch.ones(2).to(torch.float8_e5m2)),
        ("meta", torch.ones(2, device="meta")),
    ]
    assert found(*tensors) == []


def test_values_of_a_sparse_tensor_are_searched() -> None:
    """A sparse tensor's values are searched, without its implicit zeros."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), torch.tensor([1.0, math.inf]), (4,), check_invariants=True
    )
    assert found(("sparse", sparse)) == [["sparse"]]


def test_a_buffer_that_the_first_forward_pass_breaks_is_reported(tmp_path: Path) -> None:
    """A buffer that the first forward pass makes nonfinite is reported."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
            self.register_buffer("average", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            count = torch.tensor(65_536).half()  # inf
            self.average.lerp_((x.detach().mean(0) * (count / count)).float(), 0.1)
            return x * self.weight

    net = Counted()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
    [event] = Written(tmp_path / "it").of("poison")
    assert (event["buffers"], event["at_end"]) == (["average"], True)


@pytest.mark.parametrize("is_in_batch", [False, True])
def test_inputs_are_searched_only_while_the_weights_are_finite(
    tmp_path: Path, is_in_batch: bool
) -> None:
    """A loss that nonfinite weights explain is not blamed on other values of the loop."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch, gradients = torch.ones(4, 3), [torch.ones(2)]
    with halfstep.watch(net, folder=tmp_path) as watch:
        for step in range(4):
            if step == 2 and is_in_batch:
                batch[0, 0] = math.nan
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            if step == 1 and not is_in_batch:
                gradients[0].fill_(math.nan)
            optimizer.step()
    assert watch.folder is not None
    events = [each for each in Written(watch.folder).events if each["event"] == "bad_inputs"]
    assert [event["inputs"][0]["name"] for event in events] == ["batch"] * is_in_batch
