"""Gradients of a model's parameters, computed without changing `.grad`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def check_loss(loss: object) -> None:
    """Raise TypeError or ValueError unless a loss function returned a loss."""
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise TypeError(f"loss_fn returned {kind}: return the loss as a tensor of one element")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ValueError(f"loss_fn returned a tensor of shape {shape}: return its mean or sum")
    if not loss.requires_grad:
        raise ValueError("the loss depends on no parameter that requires a gradient")


def gradients_of(loss: Tensor, parameters: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the gradients of those parameters that the loss depends on."""
    trained = {key: p for key, p in parameters.items() if p.requires_grad}
    try:
        results = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            "the model uses activation checkpointing with use_reentrant=True, which computes no "
            "gradients without changing .grad: set use_reentrant=False"
        ) from error
    return {
        key: as_real(gradient)
        for key, gradient in zip(trained, results, strict=True)
        if gradient is not None
    }


def parameters_below(starts: Sequence[GradientEdge]) -> list[Tensor]:
    """Return the leaves of the graphs below some edges."""
    nodes: list[Any] = [start.node for start in starts]
    seen = set(nodes)
    leaves: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = {before for before, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    return leaves


def as_real(gradient: Tensor) -> Tensor:
    """Return a gradient of a parameter as a dense tensor of real numbers."""
    gradient = gradient.detach()
    if gradient.layout != torch.strided:  # for instance of an embedding with sparse=True
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
