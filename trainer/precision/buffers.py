"""Restores buffers, e.g. running statistics of a BatchNorm, after a skipped step.

The scaler does not apply a skipped step to the weights, but the forward pass has already changed
the buffers, and an inf or NaN in running statistics stays there. With scaler.restore_buffers they
are reset to their values before the step, decided on the device. Expanded buffers, whose elements
share memory, are ignored: neither a BatchNorm nor this module could write them in place.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class BufferRule:
    """Restores all buffers after a skipped step; does nothing if disabled."""

    def __init__(self, modules: Mapping[str, nn.Module], *, is_on: bool) -> None:
        self._modules = tuple(modules.values()) if is_on else ()
        # Buffers of one kind, and their concatenated values.
        self._saved: list[tuple[list[Tensor], Tensor]] = []

    def keep(self) -> None:
        """Copy the buffers before a step: one kernel per kind."""
        self._saved = [(group, in_a_row(group)) for group in kinds(self._modules)]

    @torch.no_grad()
    def restore(self, found_inf: Iterable[Tensor]) -> None:
        """Restore the buffers if any optimizer was skipped; decided on the device."""
        if not self._saved:
            return
        was_skipped = torch.stack(list(found_inf)).amax() > 0
        for group, before in self._saved:
            put_back(group, torch.where(was_skipped, before, in_a_row(group)))


def kinds(modules: Iterable[nn.Module]) -> list[list[Tensor]]:
    """Group buffers by dtype and device, except masks and expanded ones, which do not change."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for module in modules:
        for buffer in module.buffers():
            is_strided = buffer.layout == torch.strided
            if is_strided and buffer.dtype != torch.bool and not is_expanded(buffer):
                groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(groups.values())


def in_a_row(group: list[Tensor]) -> Tensor:
    """Return the concatenated values of buffers of one kind."""
    return torch.cat([buffer.reshape(-1) for buffer in group])


def put_back(group: list[Tensor], values: Tensor) -> None:
    """Copy concatenated values to buffers of one kind."""
    parts = torch.split(values, [buffer.numel() for buffer in group])
    shaped = [part.view(b.shape) for part, b in zip(parts, group, strict=True)]
    torch._foreach_copy_(group, shaped)


def is_expanded(buffer: Tensor) -> bool:
    """Return whether elements of a buffer share memory."""
    sizes = zip(buffer.shape, buffer.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)
