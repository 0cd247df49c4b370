"""Search for nonfinite buffers and weights, without waiting for a device. Imports torch."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from halfstep.recording.gradients import local_elements
from halfstep.watching.async_host_copy import HostCopies


def search(
    tensors: Iterable[tuple[str, Tensor]],
    host_copies: HostCopies,
    report: Callable[[list[str]], None],
) -> None:
    """Queue a search: two kernels per device. report: called with the nonfinite tensors' names."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        local = local_elements(tensor.detach())
        if _has_norm(local):
            by_device.setdefault(local.device, []).append((name, local))
    names = [name for group in by_device.values() for name, _ in group]
    is_finite = [_is_finite([tensor for _, tensor in group]) for group in by_device.values()]

    def receive(flags: list[Tensor]) -> None:
        sound = [is_sound for group in flags for is_sound in group.tolist()]
        report([name for name, is_sound in zip(names, sound, strict=True) if not is_sound])

    if names:
        host_copies.send(receive, *is_finite)


def are_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether those of the tensors that are on a device are finite: 1 or 0, there."""
    local = [local_elements(tensor.detach()) for tensor in tensors]
    own = [tensor for tensor in local if tensor.device == device and _has_norm(tensor)]
    if own:
        return _is_finite(own).all().float()
    return torch.ones((), dtype=torch.float32, device=device)


def _has_norm(tensor: Tensor) -> bool:
    """Return whether torch computes norms of a tensor, unlike fp8 and empty ones."""
    is_dense = tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta
    return is_dense and tensor.is_floating_point() and tensor.itemsize > 1


def _is_finite(tensors: list[Tensor]) -> Tensor:
    largest: list[Tensor] = list(torch._foreach_norm(tensors, torch.inf))
    return torch.stack([norm.float() for norm in largest]).isfinite()
