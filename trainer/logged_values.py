"""Values that a recipe logs in its steps; numbers reach the host asynchronously."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from halfstep.recipe import RecipeError
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.telemetry.event_codec import BadEvent, encode
from halfstep.telemetry.events import Event, Metric
from halfstep.watching.async_host_copy import HostCopies
from trainer.checkpoints.artifacts import check_names, files_of
from trainer.checkpoints.background_writer import Writer
from trainer.observers import Observer, best_effort, report_failed
from trainer.optimizers import StepResult

MOST_NAMES = 200  # per step
MOST_REFUSED = 20  # names that are reported
LOGGING = "logging of a number"

Save: TypeAlias = Callable[[int, Mapping[str, bytes]], None]  # step, files by name


class Logged(Observer):
    """Collects the values of `Recipe.log` during steps, not in replays or evaluations."""

    def __init__(
        self,
        device: torch.device,
        elapsed_ms: Callable[[], int],
        on_event: Callable[[Event], None],
    ) -> None:
        """elapsed_ms: since the run's first start."""
        self._device, self._elapsed_ms, self._on_event = device, elapsed_ms, on_event
        self._step: int | None = None  # None between steps
        self._values: dict[str, list[Tensor]] = {}
        self._files: dict[str, bytes] = {}  # files of values that are not numbers
        self.has_host_values = False  # in the step under way
        self._names: dict[str, bool] = {}  # by name of a number: whether it can be recorded
        self.save: Save | None = None
        self._host_copies, self._writer = HostCopies(), Writer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all values are stored, also after a step that raised."""
        self._writer.close()

    def log(self, values: Mapping[str, object]) -> None:
        """Log values of the current step. Raises RecipeError for unsupported values.

        Several numbers of a name are averaged; for other values the last one is used. A number with
        an invalid name is left out, with one warning.
        """
        if self._step is None:
            return
        for name, value in values.items():
            self.has_host_values |= not isinstance(value, Tensor)
            if name not in self._values and len(self._values) + len(self._files) >= MOST_NAMES:
                raise RecipeError(f'log got "{name}"; allowed: at most {MOST_NAMES} names per step')
            if is_number(value):
                if self._is_recordable(name, self._step):
                    self._values.setdefault(name, []).append(self._number(value))
            else:
                files = files_of({name: value})
                check_names(files)
                self._files |= files

    def before_step(self, step: int) -> None:
        """Accept values from now on."""
        self._step, self._values, self._files, self.has_host_values = step, {}, {}, False

    def take(self) -> dict[str, list[Tensor]]:
        """Return the numbers that a captured step has logged; a replay writes them again."""
        values, self._values = self._values, {}
        return values

    def repeat(self, values: Mapping[str, list[Tensor]]) -> None:
        """Log the numbers of a replay."""
        self._values = dict(values)

    def after_step(self, result: StepResult) -> None:
        """Queue the copy of the step's numbers, and report complete copies."""
        if self._step is not None and self._values:
            means = [
                torch.stack(value).mean() if len(value) > 1 else value[0]
                for value in self._values.values()
            ]
            report = partial(self._report, self._step, list(self._values), self._elapsed_ms())
            self._host_copies.send(report, torch.stack(means))
        if self._step is not None and self._files and self.save is not None:
            # A thread waits for the disk; a full disk does not end the run.
            self._writer.begin(partial(self._save, self.save, self._step, self._files))
        self._step, self._values = None, {}
        self._host_copies.report()

    def drain(self) -> None:
        """Wait for the device and the disk, and report the rest."""
        self._host_copies.report(wait=True)
        self._writer.wait()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Ignore logged values temporarily: the work is not part of the step."""
        step, self._step = self._step, None
        try:
            yield
        finally:
            self._step = step

    def _is_recordable(self, name: str, step: int) -> bool:
        if name not in self._names:
            event = Metric(step=step, name=name, value=0, elapsed_ms=0)
            try:
                encode(event)
            except BadEvent as error:
                self._names[name] = False
                if [*self._names.values()].count(False) <= MOST_REFUSED:
                    report_failed(LOGGING, step, error, self._on_event)
            else:
                self._names[name] = True
        return self._names[name]

    def _save(self, save: Save, step: int, files: Mapping[str, bytes]) -> None:
        if self.save is None:  # an earlier file could not be saved
            return
        with best_effort("saving of logged values", step, self._on_event):
            try:
                save(step, files)
            except Exception:
                self.save = None
                raise

    def _number(self, value: Any) -> Tensor:
        value = as_scalar(value)
        if not isinstance(value, Tensor):
            return torch.full((), float(value), dtype=torch.float32, device=self._device)
        return value.detach().to(self._device, torch.float32, non_blocking=True, copy=True)

    def _report(self, step: int, names: list[str], elapsed_ms: int, arrived: list[Tensor]) -> None:
        for name, value in zip(names, arrived[0].tolist(), strict=True):
            self._on_event(Metric(step=step, name=name, value=value, elapsed_ms=elapsed_ms))
