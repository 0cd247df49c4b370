"""Buffers in a skipped step, such as the running statistics of a BatchNorm.

The scaler keeps a skipped step from the weights; a forward pass has changed the buffers by then,
and an inf or NaN in running statistics stays there. By scaler.restore_buffers they are what they
were before the step, decided on the device. Expanded buffers, whose elements share memory, are left
as they are: nothing writes them in place, a BatchNorm no more than this could.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class BufferRule:
    """Puts all buffers back to before a step that was skipped; switched off it does nothing."""

    def __init__(self, modules: Mapping[str, nn.Module], *, is_on: bool) -> None:
        self._modules = tuple(modules.values()) if is_on else ()
        self._kept: list[tuple[list[Tensor], Tensor]] = []  # of a kind, and their values in a row

    def keep(self) -> None:
        """Copy them, before a step: a kernel for each kind of buffers."""
        self._kept = [(group, in_a_row(group)) for group in kinds(self._modules)]

    @torch.no_grad()
    def restore(self, found_inf: Iterable[Tensor]) -> None:
        """Put them back if any optimizer was skipped, as the device knows."""
        if not self._kept:
            return
        was_skipped = torch.stack(list(found_inf)).amax() > 0
        for group, before in self._kept:
            put_back(group, torch.where(was_skipped, before, in_a_row(group)))


def kinds(modules: Iterable[nn.Module]) -> list[list[Tensor]]:
    """Return the buffers by type and device; masks, which no step changes, stay away, and so do
    expanded ones.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for module in modules:
        for buffer in module.buffers():
            is_strided = buffer.layout == torch.strided
            if is_strided and buffer.dtype != torch.bool and not is_expanded(buffer):
                groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(groups.values())


def in_a_row(group: list[Tensor]) -> Tensor:
    """Return the values of buffers of one kind, one behind the other."""
    return torch.cat([buffer.reshape(-1) for buffer in group])


def put_back(group: list[Tensor], values: Tensor) -> None:
    """Give buffers of one kind these values."""
    parts = torch.split(values, [buffer.numel() for buffer in group])
    shaped = [part.view(b.shape) for part, b in zip(parts, group, strict=True)]
    torch._foreach_copy_(group, shaped)


def is_expanded(buffer: Tensor) -> bool:
    """Whether its elements share memory."""
    sizes = zip(buffer.shape, buffer.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)
