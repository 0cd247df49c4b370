"""Observers of a training: telemetry, histogram, replay, stop rules.

The loop calls each of them at the same hooks, in the order in which they joined:

    before_step     before the step's batch is drawn
    reads_inside    whether the step has to run without a CUDA graph
    before_clip     an optimizer's gradients are complete, and not clipped yet
    before_update   the weights are about to change, for the first time in this step
    after_step      all of the step is queued on the device, except the update of the scale
    receive         records of steps have reached the host, some steps later
    drain           wait for the device and report the rest: before work that waits for it anyway

None of them changes a bit of the training. A *diagnosis* that raises, for lack of memory for
example, does not end the run: the failure is reported as an event, and the observer is switched
off.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfstep.telemetry.events import Event, FailedDiagnosis
from halfstep.telemetry.spool import Steps
from halfstep.watching.async_host_copy import HostCopies

if TYPE_CHECKING:
    from trainer.optimizers import StepResult, WatchedOptimizer


class Observer:
    """Base class whose methods do nothing; override those of interest."""

    is_diagnosis: bool = False

    def before_step(self, step: int) -> None:
        """Receive the number of the next step."""

    def before_clip(self, optimizer: "WatchedOptimizer", factor: Tensor) -> None:
        """Read an optimizer's gradients. factor: what they include, the scale or 1."""

    def before_update(self) -> None:
        """Read the weights of the previous step, for the last time."""

    def after_step(self, result: "StepResult") -> None:
        """Queue the measurements of this step."""

    def reads_inside(self) -> bool:
        """Return whether this step has to run without a CUDA graph, for this observer."""
        return False

    def receive(self, records: Steps) -> None:
        """Receive records, in order of their steps."""

    def drain(self) -> None:
        """Wait for the device and report the rest."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""


class CopyingObserver(Observer):
    """Base class of observers whose measurements reach the host without a wait."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._step = 0
        self._host_copies = HostCopies()

    def after_step(self, result: "StepResult") -> None:
        """Report complete copies."""
        self._host_copies.report()

    def drain(self) -> None:
        """Wait for the device and report the rest."""
        self._host_copies.report(wait=True)


#: Of an error message in its event; the log has all of it.
ERROR_CHARACTERS = 1000
MOMENTS = (
    "before_step",
    "reads_inside",
    "before_clip",
    "before_update",
    "after_step",
    "receive",
    "drain",
)


class Observers:
    """The observers of a training, called as one."""

    def __init__(self, on_steps: Callable[[Steps], None], on_event: Callable[[Event], None]):
        self._on_steps, self._on_event = on_steps, on_event
        self.members: dict[str, Observer] = {}
        self._calls: dict[str, list[tuple[str, Callable[..., bool | None]]]] = {
            m: [] for m in MOMENTS
        }
        self._step = 0

    def join(self, **observers: Observer) -> None:
        """Add observers, by the names of their states in checkpoints."""
        self.members |= observers
        for name, observer in observers.items():
            for moment, calls in self._calls.items():
                # An observer that does not override a hook costs nothing there.
                if getattr(type(observer), moment) is not getattr(Observer, moment):
                    calls.append((name, getattr(observer, moment)))

    @property
    def step(self) -> int:
        """The step under way."""
        return self._step

    def reads_inside(self) -> bool:
        """Return whether an observer reads the step under way from the inside."""
        return any(call() for _name, call in self._calls["reads_inside"])

    def before_step(self, step: int) -> None:
        """Announce the next step."""
        self._step = step
        self._call("before_step", step)

    def before_clip(self, optimizer: "WatchedOptimizer", factor: Tensor) -> None:
        """Pass on an optimizer's gradients, not clipped yet. factor: what they include."""
        self._call("before_clip", optimizer, factor)

    def before_update(self) -> None:
        """Announce that the weights are about to change."""
        self._call("before_update")

    def after_step(self, result: "StepResult") -> None:
        """Pass on the result of the step, as tensors on the device."""
        self._call("after_step", result)

    def receive(self, records: Steps) -> None:
        """Pass records to the run's history first, then to the observers."""
        self._on_steps(records)
        self._call("receive", records)

    def drain(self) -> None:
        """Wait for the device; report everything."""
        self._call("drain")

    def _call(self, moment: str, *arguments: object) -> None:
        for name, call in self._calls[moment]:
            try:
                call(*arguments)
            except Exception as error:
                if not self.members[name].is_diagnosis:
                    raise
                self._dismiss(name, error)

    def _dismiss(self, name: str, error: Exception) -> None:
        for moment, calls in self._calls.items():
            # A new list, because the old one is being iterated.
            self._calls[moment] = [call for call in calls if call[0] != name]
        report_failed(name, self._step, error, self._on_event)


@contextmanager
def best_effort(name: str, step: int, on_event: Callable[[Event], None]) -> Iterator[None]:
    """Run optional work: an exception is reported, and the run continues."""
    try:
        yield
    except Exception as error:
        report_failed(name, step, error, on_event)


def report_failed(
    name: str, step: int, error: Exception, on_event: Callable[[Event], None]
) -> None:
    """Report a failed diagnosis: in the run's log with the traceback, and as an event."""
    sys.stderr.write(f"Halfstep: the {name} failed; the run continues without it.\n")
    sys.stderr.write("".join(traceback.format_exception(error)))
    text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS].replace("\0", "")
    text = text.encode(errors="backslashreplace").decode()  # text that a database can store
    on_event(FailedDiagnosis(step=step, diagnosis=name, error=text))
    error.__traceback__ = None  # its frames refer to tensors
