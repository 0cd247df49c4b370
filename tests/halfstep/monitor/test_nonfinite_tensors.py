"""The search for nonfinite buffers and weights."""

import math

import torch
from torch import Tensor

from halfstep.evidence.nonfinite_tensors import search
from halfstep.monitor.async_host_copy import HostCopies


def found(*tensors: tuple[str, Tensor]) -> list[list[str]]:
    """Return what a search reports."""
    reports: list[list[str]] = []
    host_copies = HostCopies()
    search(tensors, host_copies, reports.append)
    host_copies.report(wait=True)
    return reports


def test_each_type_of_floating_point_is_searched() -> None:
    """In one search; a tensor with a graph too, and the two of one name."""
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
    """A first search needs the answer: nothing is nonfinite by design."""
    assert found(("large", torch.tensor(3e38))) == [[]]


def test_tensors_without_a_norm_are_left_out() -> None:
    """Integers, empty tensors and fp8: without others there is no search, and no report."""
    tensors = [
        ("integers", torch.ones(2, dtype=torch.int64)),
        ("empty", torch.ones(0)),
        ("fp8", torch.ones(2).to(torch.float8_e5m2)),
    ]
    assert found(*tensors) == []


def test_values_of_a_sparse_tensor_are_searched() -> None:
    """Its zeros need no search."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), torch.tensor([1.0, math.inf]), (4,), check_invariants=True
    )
    assert found(("sparse", sparse)) == [["sparse"]]
