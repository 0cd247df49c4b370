"""Buffers that an overflow has left with an inf or a NaN, named once a skip was heard of.

A skipped step leaves the weights alone, but a BatchNorm's running statistics have taken the batch
in, and no later batch takes an inf out again: so it is enough to look when the skip's row has come
to the host, steps later. A run without skips pays nothing, and no step waits for an answer.
"""

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from halfstep.parcel import Parcel
from halfstep.spool import SKIPPED, Event, Steps
from trainer.observers import Observer
from trainer.watched import StepResult

NAMES_TOLD = 50


class Poison(Observer):
    """Looks at floating-point buffers after skips."""

    is_diagnosis = True

    def __init__(self, modules: Mapping[str, nn.Module], on_event: Callable[[Event], None]) -> None:
        self._modules, self._on_event = modules, on_event
        self._told: set[str] = set()
        self._sent: deque[tuple[int, list[str], Parcel]] = deque()

    def arrived(self, records: Steps) -> None:
        """Look at the buffers if any of these steps was skipped: two kernels, on their way."""
        skipped = records["step"][records["flags"] & SKIPPED != 0]
        if not len(skipped):
            return
        buffers = {
            f"{name}.{path}": buffer
            for name, module in self._modules.items()
            for path, buffer in module.named_buffers()
            if buffer.is_floating_point() and buffer.numel()
        }
        if buffers:
            largest: list[Tensor] = list(torch._foreach_norm(list(buffers.values()), torch.inf))
            sound = torch.stack([each.float() for each in largest]).isfinite()
            self._sent.append((int(skipped[-1]), list(buffers), Parcel.send(sound)))

    def after_step(self, result: StepResult) -> None:
        """Tell what has arrived."""
        if self._sent and self._sent[0][2].has_arrived():
            self._tell()

    def drain(self) -> None:
        """Wait for the device and tell what is left."""
        while self._sent:
            self._sent[0][2].wait()
            self._tell()

    def _tell(self) -> None:
        step, names, parcel = self._sent.popleft()
        sound = parcel.tensors[0].tolist()
        poisoned = [name for name, is_sound in zip(names, sound, strict=True) if not is_sound]
        if set(poisoned) - self._told:
            self._told.update(poisoned)
            count, told = len(poisoned), poisoned[:NAMES_TOLD]
            self._on_event({"event": "poison", "step": step, "count": count, "buffers": told})
