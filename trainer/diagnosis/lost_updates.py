"""Lost updates: updates of bf16 weights that rounding cancels, counted at an interval.

An update is lost if a weight with a nonzero gradient is unchanged by the step: the update is less
than half the distance to the next number of its dtype. This hardly happens with fp32 weights, which
are ignored. A step that is due costs a copy of the weights, others nothing.

For optimizers with stochastic rounding it also counts saved updates: weights that changed, but
would not have with rounding to nearest.

With sharded weights each rank compares its own part, and the counts are summed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.config_groups import Diagnosis
from halfstep.telemetry import events
from halfstep.telemetry.events import Event
from trainer.distributed.shards import group_of, local, sum_
from trainer.observers import CopyingObserver
from trainer.optimizers import StepResult, WatchedOptimizer


class _Before(NamedTuple):
    """A weight before its update."""

    name: str
    weight: nn.Parameter
    values: Tensor  # of this rank's part
    has_update: Tensor  # bool: where it has a nonzero gradient
    would_stay: list[Tensor]  # bool: where rounding to nearest would not change it

    def counts(self) -> Tensor:
        """Return (3,): elements with a gradient, those of them unchanged, and those saved."""
        stayed = local(self.weight.detach()) == self.values
        saved = [self.has_update & mask & ~stayed for mask in self.would_stay]
        counted = [
            self.has_update,
            self.has_update & stayed,
            *(saved or [torch.zeros_like(stayed)]),
        ]
        return torch.stack([mask.sum() for mask in counted])


class Updates(CopyingObserver):
    """Compares bf16 weights before and after a step that is due."""

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        settings: Diagnosis,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__(on_event)
        weights = [weight for watched in optimizers.values() for weight in watched.parameters]
        self._shared_with = group_of(weights)
        self.is_diagnosis = self._shared_with is None  # else all ranks must fail together
        has_bf16 = any(weight.dtype == torch.bfloat16 for weight in weights)
        self._every_steps = settings.updates_every_steps if has_bf16 else 0
        self._is_due = False
        self._before: list[_Before] = []
        self._error: Exception | None = None
        self._rounds_by_chance = False
        for watched in optimizers.values():
            if nearest := getattr(watched.optimizer, "nearest", None):
                self._rounds_by_chance = True
                looking = partial(self._look_ahead, nearest)
                watched.optimizer.register_step_pre_hook(looking)

    def before_step(self, step: int) -> None:
        """Announce the next step."""
        self._step, self._before = step, []
        self._is_due = bool(self._every_steps) and step % self._every_steps == 0

    def reads_inside(self) -> bool:
        """Return whether this step is counted."""
        return self._is_due

    def before_clip(self, optimizer: WatchedOptimizer, factor: Tensor) -> None:
        """Copy the weights that are about to be updated, if the step is due."""
        if self._is_due:
            self._before += [
                _Before(name, weight, local(weight.detach()).clone(), _is_not_zero(weight.grad), [])
                for name, weight in zip(optimizer.names, optimizer.parameters, strict=True)
                if weight.dtype == torch.bfloat16 and weight.grad is not None
            ]

    def _look_ahead(
        self,
        nearest: Callable[[nn.Parameter], Tensor],
        optimizer: Optimizer,
        _args: object,
        _kwargs: object,
    ) -> None:
        """Record where weights would not change; their gradients are clipped by now.

        An exception here, e.g. for lack of memory, would end the run, so `after_step` raises it.
        """
        own = {weight for group in optimizer.param_groups for weight in group["params"]}
        try:
            for before in self._before:
                if before.weight in own:
                    before.would_stay.append(nearest(before.weight) == before.values)
        except Exception as error:
            self._before, self._error = [], error

    def after_step(self, result: StepResult) -> None:
        """Queue the copy of the counts, and report complete copies."""
        if self._error is not None:
            raise self._error
        if self._before:
            counts = sum_(
                torch.stack([before.counts() for before in self._before]), self._shared_with
            )
            names = [before.name for before in self._before]
            self._host_copies.send(partial(self._report, self._step, names), counts)
            self._before = []
        self._host_copies.report()

    def _report(self, step: int, names: list[str], arrived: list[Tensor]) -> None:
        modules: dict[str, list[int]] = {}
        for name, counts in zip(names, arrived[0].tolist(), strict=True):
            before = modules.get(module := name.rpartition(".")[0], [0, 0, 0])
            modules[module] = [a + b for a, b in zip(before, counts, strict=True)]
        counted = [
            events.UpdatedModule(
                name=name,
                wanted=wanted,
                lost=lost,
                saved=saved if self._rounds_by_chance else UNSET,
            )
            for name, (wanted, lost, saved) in modules.items()
        ]
        self._on_event(events.Updates(step=step, modules=counted))


def _is_not_zero(gradient: Tensor) -> Tensor:
    own = local(gradient)
    return (own.to_dense() if own.is_sparse else own) != 0
