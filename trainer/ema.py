"""Exponential moving average of the weights, on the device, without effect on training.

After each update of the weights w, with n updates so far,

    average += (1 - d) (w - average),  d = min(decay, (1 + n)
(10 + n))

so that a short run's average does not lag behind at the initial weights. A skipped step is not an
update: the average is unchanged, by a factor of 0 on the device, without a wait of the host.
Averages are fp32, whatever the dtype of the weights. Buffers are not averaged: the network's own
are used with both.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.distributed.shards import local, part
from trainer.optimizers import WatchedOptimizer

PREFIX = "ema/"  # of the metrics of averaged weights
CHUNK_ELEMENTS = 2**24  # updated at once, which needs as much temporary memory


class Ema:
    """The averages of all trained weights, by optimizer."""

    def __init__(
        self,
        decay: float,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, WatchedOptimizer],
    ) -> None:
        """Start with the current weights.  modules: without wrappers."""
        self._decay, self._modules = decay, modules
        self._weights: dict[str, list[Tensor]] = {
            name: list(optimizer.parameters) for name, optimizer in optimizers.items()
        }
        self._averages = {
            name: [weight.detach().to(torch.float32, copy=True) for weight in weights]
            for name, weights in self._weights.items()
        }
        self._updates = {
            name: torch.zeros((), dtype=torch.float32, device=averages[0].device)
            for name, averages in self._averages.items()
        }

    @torch.no_grad()
    def update(self, found_inf: Mapping[str, Tensor | float]) -> None:
        """Update the averages after a step. found_inf: by optimizer, 1 if it was skipped."""
        for name, skipped in found_inf.items():
            updates, was_applied = self._updates[name], 1.0 - skipped
            updates += was_applied
            decay = ((1 + updates) / (10 + updates)).clamp(max=self._decay)
            share = (1 - decay) * was_applied  # 0-dim, on the device
            parts = (_get_local_parts(weights[name]) for weights in (self._averages, self._weights))
            for averages, weights in _chunks(*parts):
                # lerp in three parts, because it accepts no device tensor as factor in one kernel.
                away = torch._foreach_sub(weights, averages)
                torch._foreach_mul_(away, share)
                torch._foreach_add_(averages, away)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Temporarily replace the networks' weights by the averages."""
        weights_before = {
            name: [weight.detach().clone() for weight in _get_local_parts(weights)]
            for name, weights in self._weights.items()
        }
        with torch.no_grad():
            for name, weights in self._weights.items():
                torch._foreach_copy_(
                    _get_local_parts(weights), _get_local_parts(self._averages[name])
                )
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weights in self._weights.items():
                    torch._foreach_copy_(_get_local_parts(weights), weights_before[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by module and weight name; tied weights under both names."""
        averages = {
            weight: average
            for name, weights in self._weights.items()
            for weight, average in zip(weights, self._averages[name], strict=True)
        }
        return {
            "updates": self._updates,
            "weights": {
                name: {
                    path: averages[weight]
                    for path, weight in module.named_parameters(remove_duplicate=False)
                    if weight in averages
                }
                for name, module in self._modules.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages."""
        own = self.state_dict()
        for name, updates in own["updates"].items():
            updates.copy_(state["updates"][name])
        for name, averages in own["weights"].items():
            for path, average in averages.items():
                average.copy_(part(state["weights"][name][path], average))


def _get_local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's parts, in the same memory."""
    return [local(tensor) for tensor in tensors]


def _chunks(
    averages: Sequence[Tensor], weights: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    chunk: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for pair in zip(averages, weights, strict=True):
        if chunk and elements + pair[0].numel() > CHUNK_ELEMENTS:
            yield [average for average, _ in chunk], [weight for _, weight in chunk]
            chunk, elements = [], 0
        chunk.append(pair)
        elements += pair[0].numel()
    if chunk:
        yield [average for average, _ in chunk], [weight for _, weight in chunk]
