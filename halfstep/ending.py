"""How the end of somebody's process is noticed, whichever it is, without changing it.

At exit, by an exception or a SIGTERM that nobody else handles, a callback is told, and what would
have happened happens.
"""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Ending:
    """Calls `on_end(status, traceback)`, unless it is cancelled.

    held: above 0 a SIGTERM waits, until `terminate` is called because it is due.
    """

    def __init__(self, on_end: Callable[[str, str | None], None]) -> None:
        self.held, self.is_due = 0, False
        self._on_end = on_end
        self._is_cancelled = False
        self._excepthook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._exits)
        self._has_signal = _is_main() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._has_signal:
            signal.signal(signal.SIGTERM, self._terminated)

    def cancel(self) -> None:
        """Put everything back as it was, where nobody has put something else."""
        self._is_cancelled = True
        atexit.unregister(self._exits)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook
        if self._has_signal and _is_main() and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def raised(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell of an exception that ends the run, unless it is somebody's wish to end it."""
        if isinstance(error, SystemExit) and not error.code:
            self._on_end("finished", None)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        self._on_end("terminated" if issubclass(kind, KeyboardInterrupt) else "failed", text)

    def terminate(self) -> None:
        """Tell of the signal, and die of it as one would have without us."""
        self.is_due = False
        if not self._is_cancelled:
            self._on_end("terminated", None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _exits(self) -> None:
        self._on_end("finished", None)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_cancelled:
            self.raised(kind, error, trace)
        self._excepthook(kind, error, trace)

    def _terminated(self, _number: int, _frame: FrameType | None) -> None:
        if self.held:  # in the midst of our own work, which is soon done
            self.is_due = True
        else:
            self.terminate()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
