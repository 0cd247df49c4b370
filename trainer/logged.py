"""What a recipe tells of its steps by itself: numbers come to the host without a wait."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.logged import is_number
from halfstep.parcel import Parcels
from halfstep.recipe import RecipeError
from halfstep.spool import Event
from trainer.artifacts import files_of
from trainer.observers import Observer
from trainer.watched import StepResult

MOST_NAMES = 200  # in a step


class Logged(Observer):
    """Takes what `Recipe.log` is told while a step is made, and in no replay or evaluation."""

    def __init__(
        self,
        device: torch.device,
        elapsed_ms: Callable[[], int],
        on_event: Callable[[Event], None],
    ) -> None:
        """elapsed_ms: since the run's first start."""
        self._device, self._elapsed_ms, self._on_event = device, elapsed_ms, on_event
        self._step: int | None = None  # while it is made
        self._told: dict[str, list[Tensor]] = {}
        self._seen: dict[str, bytes] = {}  # files of what is no number
        self.save: Callable[[int, Mapping[str, bytes]], None] | None = None  # of a step
        self._parcels = Parcels()

    def log(self, values: Mapping[str, Any]) -> None:
        """Take what is told of the step under way. Raises RecipeError for what cannot be shown.

        Of several numbers the mean is told, of anything else the last.
        """
        if self._step is None:
            return
        for name, value in values.items():
            if name not in self._told and len(self._told) + len(self._seen) >= MOST_NAMES:
                raise RecipeError(f'log was told "{name}"; allowed: {MOST_NAMES} names in a step')
            if is_number(value):
                self._told.setdefault(name, []).append(self._number(value))
            else:
                self._seen |= files_of({name: value})

    def before_step(self, step: int) -> None:
        """Listen from here on."""
        self._step, self._told, self._seen = step, {}, {}

    def after_step(self, result: StepResult) -> None:
        """Send off the step's numbers, and report what has arrived."""
        if self._step is not None and self._told:
            means = [
                torch.stack(each).mean() if len(each) > 1 else each[0]
                for each in self._told.values()
            ]
            report = partial(self._report, self._step, list(self._told), self._elapsed_ms())
            self._parcels.send(report, torch.stack(means))
        if self._step is not None and self._seen and self.save is not None:
            self.save(self._step, self._seen)
        self._step, self._told = None, {}
        self._parcels.report()

    def drain(self) -> None:
        """Wait for the device and report what is left."""
        self._parcels.report(wait=True)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Take nothing meanwhile: what is done is no part of the step."""
        step, self._step = self._step, None
        try:
            yield
        finally:
            self._step = step

    def _number(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full((), float(value), device=self._device)
        return value.detach().to(self._device, torch.float32, non_blocking=True, copy=True)

    def _report(self, step: int, names: list[str], elapsed_ms: int, arrived: list[Tensor]) -> None:
        for name, value in zip(names, arrived[0].tolist(), strict=True):
            event = {"event": "metric", "step": step, "name": name, "value": value}
            self._on_event(event | {"elapsed_ms": elapsed_ms})
