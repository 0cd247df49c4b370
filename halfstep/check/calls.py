"""Mistakes in the AMP calls of a loop that is checked. This module imports torch."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch import nn

from halfstep.diagnosis.finding import Finding
from halfstep.diagnosis.loop_mistakes import LoopSigns, find_mistaken_calls, find_other_mistakes
from halfstep.diagnosis.zero_gradients import count_zero_steps
from halfstep.shadow.lines import place_of_caller
from halfstep.shadow.operations import Place
from halfstep.shadow.sanitizer import Sanitizer
from halfstep.telemetry.events import Event, GradientsDropped, ScaledClip, StepEvent
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import Steps
from halfstep.watching.hooks import Hooks
from halfstep.watching.loop import Loop

MOST_EVENTS = 1000
Mistake = tuple[Finding, Place]


class Calls:
    """Observes the calls of a loop as halfstep.watch does, outside of its shadow steps."""

    def __init__(self, sanitizer: Sanitizer, on_error: Callable[[Exception], None]) -> None:
        """sanitizer: paused while a call is observed; it knows the modules."""
        self._events: dict[str, tuple[StepEvent, Place]] = {}  # the newest of each kind
        self._zero_steps, self._scale, self._has_scaler = 0, 1.0, False
        self._applied = 0  # steps
        self._clip = Place()  # the latest
        self._loop = Loop(self._steps, self._event)
        for method in ("clipping", "clipping_values"):
            setattr(self._loop.clips, method, self._noting(getattr(self._loop.clips, method)))
        self._loop.evidence.armed.stop()
        self._hooks = Hooks(self._loop)
        self._sanitizer = sanitizer
        self._guard = ApartGuard(sanitizer, on_error)
        sanitizer.names.on_root = self._add

    def install(self) -> None:
        """Begin to observe."""
        self._hooks.arm(self._guard)

    def remove(self) -> None:
        """Stop observing, and read the rest."""
        self._guard.held += 1
        try:
            self._loop.close()
            self._loop.drain(0.0)
        finally:
            self._guard.held -= 1
            self.disarm()
            self._loop.end()

    def disarm(self) -> None:
        """Remove the wrappers and hooks, those that an optimizer's step has kept as well."""
        self._hooks.disarm()

    def mistakes(self) -> tuple[list[Mistake], list[Mistake]]:
        """Return mistakes from which other symptoms may follow, and those that explain nothing."""
        signs = LoopSigns(
            events=[event for event, _place in self._events.values()],
            last=self._loop.step,
            zero_steps=self._zero_steps,
            scale=self._scale,
            has_scaler=self._has_scaler,
        )
        return self._add_places(find_mistaken_calls(signs)), self._add_places(
            find_other_mistakes(signs)
        )

    def _add_places(self, findings: Iterable[Finding]) -> list[Mistake]:
        """Add the line of the call that showed a mistake, if it is known."""
        places = {id(event): place for event, place in self._events.values()}
        return [(finding, places.get(id(finding.evidence), Place())) for finding in findings]

    def _noting(self, clipping: Callable[..., None]) -> Callable[..., None]:
        """Return a method that keeps the line of a clip, which only a later call shows as wrong."""

        def wrapper(*arguments: object) -> None:
            self._clip = place_of_caller()
            clipping(*arguments)

        return wrapper

    def _add(self, module: nn.Module) -> None:
        """Name parameters as a module does, if its classes can be keys."""
        self._guard.held += 1
        try:
            self._loop.add((module,))
        except TypeError:
            return
        finally:
            self._guard.held -= 1

    def _event(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            kind = getattr(event, "optimizer", getattr(event, "dtype", ""))
            key = f"{event.tag} {kind}"
            if key in self._events:
                self._events[key] = event, self._events[key][1]
            elif len(self._events) < MOST_EVENTS:
                self._events[key] = event, self._place_of(event)

    def _place_of(self, event: StepEvent) -> Place:
        """Return the line to change for an event that the call under way shows."""
        if isinstance(event, ScaledClip):
            return self._clip
        if isinstance(event, GradientsDropped):
            return self._sanitizer.mode.scaled_read
        return place_of_caller()

    def _steps(self, steps: Steps) -> None:
        self._scale = float(steps["scale"][-1])
        self._has_scaler |= bool((steps["scale"] != 1).any())
        self._zero_steps = count_zero_steps(steps, self._zero_steps, self._applied)
        self._applied += int((steps["flags"] & SKIPPED == 0).sum())


class ApartGuard:
    """Guard of halfstep.watching.hooks: runs the listener's operators without shadows."""

    is_due = False

    def __init__(self, sanitizer: Sanitizer, on_error: Callable[[Exception], None]) -> None:
        self._sanitizer, self.handle_error = sanitizer, on_error
        self._held, self._apart = 0, ExitStack()

    @property
    def held(self) -> int:
        """Calls of the listener under way."""
        return self._held

    @held.setter
    def held(self, count: int) -> None:
        if count and not self._held:
            self._apart.enter_context(self._sanitizer.apart())
        elif self._held and not count:
            self._apart.close()
        self._held = count

    def terminate(self) -> None:
        """Handle a deferred signal: none is deferred."""
