"""Guard of a watched run, in which an internal error ends the watching, and not the script."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from halfstep.session.exit_hooks import ExitHooks
from halfstep.session.stderr import Messages, say
from halfstep.telemetry.events import FailedDiagnosis
from halfstep.telemetry.patient_spool import PatientSpool

if TYPE_CHECKING:
    from halfstep.watching.hooks import Hooks
    from halfstep.watching.loop import Loop

T = TypeVar("T")


class ErrorGuard:
    """Guard of internal calls, on as long as the loop is observed."""

    exit_hooks: ExitHooks  # they defer a signal during a call

    def __init__(self, loop: "Loop", taps: "Hooks", spool: PatientSpool) -> None:
        self._loop, self._taps, self._spool = loop, taps, spool
        self.is_on = False
        self.messages = Messages(say)

    def arm(self) -> None:
        """Start to observe the loop."""
        self._taps.arm(self.exit_hooks)
        self.is_on = True

    def disarm(self) -> None:
        """Stop observing."""
        self.is_on = False
        self._taps.disarm()
        self._loop.end()

    def call(self, call: Callable[..., T], *given: object, **named: object) -> T | None:
        """Call an internal function; if it raises, print one line and stop watching."""
        return self.protect(call, *given, **named) if self.is_on else None

    def protect(self, call: Callable[..., T], *given: object, **named: object) -> T | None:
        """Call an internal function, also one that is called after the watching has stopped."""
        hooks, result = self.exit_hooks, None
        hooks.held += 1
        try:
            result = call(*given, **named)
        except Exception as error:
            self.fail(error)
        finally:  # KeyboardInterrupt propagates
            hooks.held -= 1
        if hooks.is_due and not hooks.held:
            hooks.terminate()
        return result

    def fail(self, error: Exception) -> None:
        """Stop observing after an internal error; the run's real outcome is still recorded."""
        self.disarm()
        text = " ".join(f"{type(error).__name__}: {error}".split())  # one line
        say(f"{text}; the training continues unwatched")
        with suppress(Exception):  # the drain may be what failed
            self._loop.drain(0.0)
        note = FailedDiagnosis(step=self._loop.step, diagnosis="watch", error=text[:1000])
        with suppress(OSError, ValueError):  # the disk failed, or the spool is closed
            self._spool.event(note)

    def complain(self, text: str) -> None:
        """Print a line on stderr, once per text and a few of each kind."""
        self.messages.say_once(text)
