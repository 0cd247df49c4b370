"""Thread that writes what has waited while the script takes no step.

A process that is killed then loses no more than the last second. The thread does not run during a
fork, so a child inherits no lock that it holds.
"""

import os
import sys
import threading
from collections.abc import Callable

POLL_SECONDS = 0.5
STOP_SECONDS = 1.0  # timeout for the thread to stop: a hung disk may hold it

_running: "IdleWriter | None" = None


class IdleWriter:
    """Thread that calls `write` twice a second, until `stop` or an exception."""

    def __init__(self, write: Callable[[], None], complain: Callable[[str], None]) -> None:
        """complain: called with a message when an exception ends the thread."""
        self._write, self._complain = write, complain
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless Python has no global lock, on which the loop's state relies."""
        global _running
        if getattr(sys, "_is_gil_enabled", lambda: True)():
            _running = self
            self.resume()

    def stop(self) -> None:
        """Stop the thread, after a call under way."""
        global _running
        if _running is self:
            _running = None
        self.pause()

    def pause(self) -> None:
        """Stop the thread until `resume`."""
        self._is_stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def resume(self) -> None:
        """Start the thread."""
        self._is_stopped = is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._poll, args=[is_stopped], name="halfstep-idle", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no thread can start: rows wait for the next step
            self._thread = None

    def _poll(self, is_stopped: threading.Event) -> None:
        while not is_stopped.wait(POLL_SECONDS):
            try:
                self._write()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self._complain(f"steps are written only when a further step comes: {text}")
                return


def _before_fork() -> None:
    if _running:
        _running.pause()


def _after_fork_in_parent() -> None:
    if _running:
        _running.resume()


def _after_fork_in_child() -> None:
    global _running
    _running = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
