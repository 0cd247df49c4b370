"""Lost updates: updates of bf16 weights that round to nothing, counted at an interval.

A weight whose gradient is not 0 and that is what it was before the step: the optimizer's update is
less than half the distance to the next number of its type. Of fp32 weights next to none are, so
those are not looked at. In steps that are due it costs a copy of the weights, otherwise nothing.

Of an optimizer that rounds by chance, it is counted what that has saved: the weights that have
moved, and would not have if they were rounded to the nearest.

Of weights in shards each rank compares its own, and the counts are added up.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.config_groups import Diagnosis
from halfstep.monitor.async_host_copy import HostCopies
from halfstep.telemetry.spool import Event
from trainer.distributed.shards import group_of, local, sum_
from trainer.observers import Observer
from trainer.optimizers import StepResult, WatchedOptimizer


class _Before(NamedTuple):
    """A weight as it was before its update."""

    name: str
    weight: nn.Parameter
    values: Tensor  # of this rank's part
    wanted: Tensor  # bool: where it has a gradient
    would_stay: list[Tensor]  # bool: where it would not move, of one that rounds by chance

    def counts(self) -> Tensor:
        """Return (3,): elements with a gradient, those of them that have not moved, those saved."""
        stayed = local(self.weight.detach()) == self.values
        saved = [self.wanted & each & ~stayed for each in self.would_stay]
        counted = [self.wanted, self.wanted & stayed, *(saved or [torch.zeros_like(stayed)])]
        return torch.stack([each.sum() for each in counted])


class Updates(Observer):
    """Compares weights in bf16 before and after a step that is due."""

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        settings: Diagnosis,
        on_event: Callable[[Event], None],
    ) -> None:
        weights = [weight for watched in optimizers.values() for weight in watched.parameters]
        self._shared_with = group_of(weights)
        self.is_diagnosis = self._shared_with is None  # else none of the ranks may give up alone
        has_bf16 = any(weight.dtype == torch.bfloat16 for weight in weights)
        self._every_steps = settings.updates_every_steps if has_bf16 else 0
        self._on_event = on_event
        self._step, self._is_due = 0, False
        self._before: list[_Before] = []
        self._parcels = HostCopies()
        self._error: Exception | None = None
        self._rounds_by_chance = False
        for watched in optimizers.values():
            if nearest := getattr(watched.optimizer, "nearest", None):
                self._rounds_by_chance = True
                looking = partial(self._look_ahead, nearest)
                watched.optimizer.register_step_pre_hook(looking)

    def before_step(self, step: int) -> None:
        """Say which step comes."""
        self._step, self._before = step, []
        self._is_due = bool(self._every_steps) and step % self._every_steps == 0

    def unscaled(self, optimizer: WatchedOptimizer) -> None:
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
        """Note where its weights would stay; by now their gradients are clipped.

        What is raised here, for want of memory say, would end the run: `after_step` may raise it.
        """
        own = {weight for group in optimizer.param_groups for weight in group["params"]}
        try:
            for each in self._before:
                if each.weight in own:
                    each.would_stay.append(nearest(each.weight) == each.values)
        except Exception as error:
            self._before, self._error = [], error

    def after_step(self, result: StepResult) -> None:
        """Queue the copy of the counts, and report those that have arrived."""
        if self._error is not None:
            raise self._error
        if self._before:
            counts = sum_(torch.stack([each.counts() for each in self._before]), self._shared_with)
            names = [each.name for each in self._before]
            self._parcels.send(partial(self._report, self._step, names), counts)
            self._before = []
        self._parcels.report()

    def drain(self) -> None:
        """Wait for the device and report the rest."""
        self._parcels.report(wait=True)

    def _report(self, step: int, names: list[str], arrived: list[Tensor]) -> None:
        modules: dict[str, list[int]] = {}
        for name, counts in zip(names, arrived[0].tolist(), strict=True):
            before = modules.get(module := name.rpartition(".")[0], [0, 0, 0])
            modules[module] = [a + b for a, b in zip(before, counts, strict=True)]
        found = [
            {"name": name, "wanted": wanted, "lost": lost}
            | ({"saved": saved} if self._rounds_by_chance else {})
            for name, (wanted, lost, saved) in modules.items()
        ]
        self._on_event({"event": "updates", "step": step, "modules": found})


def _is_not_zero(gradient: Tensor) -> Tensor:
    own = local(gradient)
    return (own.to_dense() if own.is_sparse else own) != 0
