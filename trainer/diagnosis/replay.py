"""Replay: a skipped step once more, under hooks, to name the operation that overflowed.

A batch is kept as what made it: the sampler's position and the state of every random generator.
A skipped step leaves the weights as they were, so going through it again with the same examples,
random numbers, buffers and scale computes the same bits, up to the first inf or NaN.

When. The host learns of a skip after the device has gone on, and the next update would move the
weights. So while replay watches, the host waits, in step n + 1, between queueing the backward pass
and queueing the update, for the flag of step n. At that point the weights are still those of step
n. The device has a whole forward and backward pass queued: the host waits for it, but it never
runs dry, and that is what watching costs, apart from copies of generator states and buffers.

What is exact. One optimizer, or several of which all were skipped, in one process, not compiled.
With several of which one has stepped, its weights have moved. Of several devices, the first replays
its own examples, and an overflow in another's is not found. A compiled network is replayed
uncompiled. A step asked for by hand that was not skipped, or is past, has other weights. The event
says so: `exact` and `notes`.

The run goes on as if nothing had happened: generators, buffers and the sampler are put back, no
gradient is touched (`torch.autograd.grad` returns them), weights are only read. A recipe that keeps
count of its own calls, in an attribute, counts the replay as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.config import RunConfig
from halfstep.spool import SKIPPED, Event, Steps
from trainer.checkpoint import random_state, restore_random_state
from trainer.diagnosis.trace import Trace
from trainer.observers import Observer
from trainer.policies import Calibration
from trainer.sampler import Sampler
from trainer.telemetry import StepResult

if TYPE_CHECKING:
    from trainer.train import Rig

SCALES_KEPT = 1000  # of skipped steps, for a replay by hand


@dataclass
class _Step:
    """What makes a step again. The flags arrive on the host with the event."""

    number: int
    position: int  # the sampler's, before the step
    random: dict[str, Any] | None  # None: not known any more
    buffers: list[Tensor]
    scale: Tensor | float = 1.0
    found_inf: Tensor | None = None  # (O,) on the host, of the optimizers that took part
    arrived: torch.cuda.Event | None = None


class Replay(Observer):
    """Watches for the first skips after calibration, and for steps asked for by hand."""

    is_diagnosis = True

    def __init__(
        self,
        rig: "Rig",
        modules: Mapping[str, nn.Module],
        sampler: Sampler,
        config: RunConfig[Any],
        device: torch.device,
        on_event: Callable[[Event], None],
    ) -> None:
        self._rig, self._modules, self._sampler = rig, dict(modules), sampler
        self._device, self._on_event = device, on_event
        self._most = config.diagnosis.replay_skips if rig.scaler.is_enabled() else 0
        self._replayed = 0  # of those, by themselves
        self._calibration = Calibration()
        self._scales: dict[int, float] = {}  # of skipped steps
        self._asked: dict[int, list[int]] = {}  # steps to come: the requests for them
        self._now = 0
        self._kept: _Step | None = None

    def arrived(self, records: Steps) -> None:
        """Look at the steps that have arrived: whether calibration is over, and what skipped."""
        for record, flags in zip(records, records["flags"].tolist(), strict=True):
            was_skipped = bool(flags & SKIPPED)
            self._calibration.count(was_skipped)
            if was_skipped:
                self._scales[int(record["step"])] = float(record["scale"])
        while len(self._scales) > SCALES_KEPT:
            del self._scales[next(iter(self._scales))]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, so as to replay the skips that this one would."""
        calibration = self._calibration.state_dict()
        return {"calibration": calibration, "replayed": self._replayed, "scales": self._scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        self._calibration.load_state_dict(state["calibration"])
        self._replayed, self._scales = state["replayed"], dict(state["scales"])

    def before_step(self, step: int) -> None:
        """Keep what makes this step, if it may have to be replayed: before its batch is drawn."""
        self._now = step
        self._coming: _Step | None = None
        watches = self._replayed < self._most and self._calibration.is_over
        if watches or step in self._asked:
            random = random_state(self._device)
            buffers = [buffer.clone() for buffer in self._buffers()]
            self._coming = _Step(step, self._sampler.position, random, buffers)

    def after_step(self, result: StepResult) -> None:
        """Send the flags of the step just queued on their way to the host."""
        if self._coming is None:
            return
        kept = self._kept = self._coming
        kept.scale = result.scale
        flags = torch.stack([result.updates[name].found_inf for name in result.stepped])
        kept.found_inf = flags
        if flags.is_cuda:
            kept.found_inf = torch.empty(flags.shape, pin_memory=True)
            kept.found_inf.copy_(flags, non_blocking=True)
            kept.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            kept.arrived.record()

    def drain(self) -> None:
        """Replay the last step, if it was skipped."""
        self.before_update()

    def before_update(self) -> None:
        """Replay the step before, if it was skipped: the weights are still what they were."""
        kept, self._kept = self._kept, None
        if kept is None or kept.found_inf is None:
            return
        if kept.arrived is not None:
            kept.arrived.synchronize()  # the host waits here, and only while replay watches
        skipped = kept.found_inf != 0
        requests, notes = self._asked.pop(kept.number, []), []
        if not skipped.any():
            notes.append("the step was not skipped: the weights are those after it")
        elif not skipped.all():
            notes.append("an optimizer was not skipped: its weights are those after the step")
        if skipped.any() and not requests:
            self._replayed += 1
        if skipped.any() or requests:
            self._replay(kept, notes, requests)

    def request(self, step: int, request: int) -> None:
        """Replay a step by hand: a past one now, one to come when it has been attempted."""
        if step > self._now:
            self._asked.setdefault(step, []).append(request)
            return
        stride = self._sampler.examples_in_a_step
        position = self._sampler.position - (self._now - step + 1) * stride
        if position < 0:  # before this run's data: it began from another run's checkpoint
            self._tell([request])
            return
        past = _Step(step, position, None, [])
        past.scale = self._scales.get(step) or self._rig.scaler.get_scale()
        notes = [f"the weights are those after step {self._now}", "dropout draws anew"]
        if step not in self._scales:
            notes.append("the scale is the present one")
        self._replay(past, notes, [request])

    def _replay(self, kept: _Step, notes: list[str], requests: list[int]) -> None:
        recipe, networks = self._rig.recipe, self._rig.recipe.modules
        if any(networks[name] is not module for name, module in self._modules.items()):
            notes = [*notes, "the plain network was replayed, on this process's examples"]
        before = random_state(self._device)
        buffers = [buffer.clone() for buffer in self._buffers()]
        position, scaler = self._sampler.position, recipe.scaler
        scale = float(kept.scale)  # from here on the host may wait
        try:
            recipe.modules = self._modules
            # A gradient penalty asks the scaler for the scale of this step, not of the next one.
            recipe.scaler = GradScaler(
                self._device.type, init_scale=scale, enabled=scaler.is_enabled()
            )
            if kept.random is not None:
                restore_random_state(kept.random, self._device)
            self._set_buffers(kept.buffers)
            self._sampler.position = kept.position
            batches = [recipe.batch(*each) for each in self._sampler.step()]
            trace = Trace(self._modules)
            loss = self._go_through(trace, batches, scale)
        finally:
            recipe.modules, recipe.scaler = networks, scaler
            self._sampler.position = position
            self._set_buffers(buffers)
            restore_random_state(before, self._device)
        found = trace.finding
        self._on_event(
            {
                "event": "replay",
                "step": kept.number,
                "exact": not notes,
                "notes": notes,
                "requested": bool(requests),
                "scale": scale,
                "found": found is not None,
                "module": found and found.module,
                "direction": found and found.direction,
                "operation": found and found.operation,
                "dtype": found and found.dtype,
                "largest_input": found and found.largest_input,
                "limit": found and found.limit,
                "loss_nonfinite": not bool(loss.isfinite()),
            }
        )
        self._tell(requests)

    def _tell(self, obeyed: list[int]) -> None:
        for request in obeyed:
            self._on_event({"event": "obeyed", "step": self._now, "request": request})

    def _go_through(self, trace: Trace, batches: list[Any], scale: float) -> Tensor:
        """Do what the step did, in its order, without updates; return its loss."""
        recipe, total = self._rig.recipe, torch.zeros((), device=self._device)
        with trace:
            passes = [recipe.training_step(batch) for batch in batches]
            while True:
                for one_pass in passes:
                    with self._rig.autocast, trace.forward():
                        loss = next(one_pass, None)
                    if loss is None:
                        return total
                    mean_loss = loss.value / len(passes)
                    total += mean_loss.detach()
                    trace.backward(
                        mean_loss * scale, self._rig.optimizers[loss.optimizer].parameters
                    )

    def _buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules.values() for buffer in module.buffers()]

    def _set_buffers(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers(), values, strict=False):
                buffer.copy_(value)
