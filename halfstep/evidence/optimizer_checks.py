"""Checks of optimizers: eps, missing gradients, refused calls. This module imports torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.recording.gradients import Gradients, local_elements
from halfstep.telemetry.events import (
    AdamEps,
    CallOrder,
    Event,
    Fp16Gradients,
    NoGradient,
    NoInfChecks,
    OutsideOptimizers,
    RoundedState,
)
from halfstep.watching.async_host_copy import HostCopies

NAMES = 50  # maximum per event
STEPS_WITHOUT_GRADIENT, STEPS_OF_A_PARAMETER = 10, 100
HALF_TYPES = (torch.float16, torch.bfloat16)
SHARE_OF_STATE = 0.01  # of moments that are 0
SMALLEST_HALF = 2.0**-24  # fp16's; a smaller eps is 0 in it
#: Parts of the messages with which a scaler rejects calls in the wrong order.
OF_ORDER = (
    *("unscale_() has already been called", "step() has already been called"),
    *("unscale_() is being called after step()", "_scale is None"),
)


class OptimizerChecks:
    """Checks that read no value of a gradient."""

    def __init__(
        self, on_event: Callable[[Event], None], report_once: Callable[[Event], None]
    ) -> None:
        self._on_event, self._once = on_event, report_once
        self.modules: tuple[nn.Module, ...] = ()
        self._has_outside = False  # parameters were reported that no optimizer has
        #: Parameters that an optimizer has or had: a loop may replace both while it trains.
        self._inside: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def record_exception(
        self, step: int, method: str, error: Exception, known: Sequence[Gradients]
    ) -> None:
        """Record an exception from a method of the scaler."""
        text = " ".join(str(error).split())[:500]
        if any(phrase in text for phrase in OF_ORDER):
            self._once(CallOrder(step=step, method=method, error=text))
        elif "No inf checks" in text:
            empty = [
                gradients.name
                for gradients in known
                if all(p.grad is None for p in gradients.parameters)
            ]
            self._once(NoInfChecks(step=step, method=method, optimizers=empty[:NAMES], error=text))
        elif "unscale FP16 gradients" in text:
            named = [
                *(
                    pair
                    for gradients in known
                    for pair in zip(gradients.names, gradients.parameters, strict=True)
                ),
                # No optimizer has been measured yet if the first step raises.
                *(pair for module in self.modules for pair in module.named_parameters()),
            ]
            half = [*{name: None for name, p in named if p.dtype == torch.float16}]
            self._once(
                Fp16Gradients(step=step, count=len(half), parameters=half[:NAMES], error=text)
            )

    def meets(self, step: int, gradients: Gradients) -> None:
        """Check an optimizer when it is first measured, or has other parameters."""
        self._inside.update(dict.fromkeys(gradients.parameters))
        half = [p for p in gradients.parameters if p.dtype == torch.float16]
        if not half:
            return
        for group in gradients.optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and 0 < eps < SMALLEST_HALF:
                self._once(AdamEps(step=step, optimizer=gradients.name, eps=eps, count=len(half)))
                return

    def check_loaded(self, step: int, optimizer: Optimizer, host_copies: HostCopies) -> None:
        """Check the state that Adam has loaded: moments that were saved in half precision."""
        counts = [
            torch.stack([(is_used & (second == 0)).sum(), is_used.sum()])
            for first, second in _moments_of(optimizer)
            for is_used in [first != 0]
        ]

        def report(arrived: list[Tensor]) -> None:
            count, used = arrived[0].tolist()
            if count > SHARE_OF_STATE * used:
                name = type(optimizer).__name__
                self._on_event(RoundedState(step=step, optimizer=name, count=count, of=used))

        if counts:
            device = counts[0].device
            host_copies.send(report, torch.stack([each.to(device) for each in counts]).sum(0))

    def check(self, step: int, gradients: Gradients, *, has_changed: bool) -> None:
        """Check the measured gradients of an optimizer's step.

        has_changed: a backward pass has changed them; a step may clear them itself.
        """
        is_all = len(gradients.without_gradient) >= _needing(gradients)
        if gradients.steps == STEPS_OF_A_PARAMETER or (
            is_all and gradients.steps == STEPS_WITHOUT_GRADIENT
        ):
            self._without_gradient(step, gradients, has_changed=has_changed)

    def check_end(self, step: int, gradients: Gradients, *, has_changed: bool) -> None:
        """Check an optimizer of a loop that has ended, however few steps it made."""
        if gradients.steps and len(gradients.without_gradient) == _needing(gradients):
            self._without_gradient(step, gradients, has_changed=has_changed)

    def _without_gradient(self, step: int, gradients: Gradients, *, has_changed: bool) -> None:
        without = gradients.without_gradient
        if not without or (has_changed and len(without) == len(gradients.parameters)):
            return
        names = [gradients.names[i] for i in sorted(without)]
        self._once(
            NoGradient(
                step=step,
                optimizer=gradients.name,
                parameters=names[:NAMES],
                count=len(names),
                of=_needing(gradients),
                steps=gradients.steps,
            )
        )

    def outside_optimizers(
        self, step: int, names: Mapping[nn.Parameter, str], known: Sequence[Gradients]
    ) -> None:
        """Find parameters with gradients that no optimizer has.

        An optimizer may step copies in fp32 of parameters in half precision, or of all of them.
        """
        having = [p for p in names if p.requires_grad and p.grad is not None]
        for gradients in known:
            for group in gradients.optimizer.param_groups:
                self._inside.update(dict.fromkeys(group["params"]))
        stepped = {id(p) for p in self._inside}
        if stepped.isdisjoint(map(id, names)):
            return
        outside = [names[p] for p in having if id(p) not in stepped and p.dtype not in HALF_TYPES]
        if outside or self._has_outside:
            self._has_outside = bool(outside)
            self._on_event(
                OutsideOptimizers(step=step, count=len(outside), parameters=outside[:NAMES])
            )


def _moments_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the local parts of first and second moments, of optimizers that have both."""
    for state in optimizer.state.values():
        moments = [state.get("exp_avg"), state.get("exp_avg_sq")]
        if all(isinstance(each, Tensor) and each.is_floating_point() for each in moments):
            first, second = map(local_elements, moments)
            if first.shape == second.shape:
                yield first, second


def _needing(gradients: Gradients) -> int:
    return sum(p.requires_grad for p in gradients.parameters)
