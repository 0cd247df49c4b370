"""Exit hooks that detect how the process ends, without changing it.

For a return, an exception, `sys.exit`, `os._exit`, one of SIGNALS, or the end of a child of
multiprocessing, a callback receives the outcome; then the process ends as it would have. Of an
abort or a segmentation fault a file remains (`CrashFile`). A process cannot detect SIGKILL.
"""

import atexit
import faulthandler
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeAlias

from halfstep.session.exit_files import CrashFile, UserSignalFiles, write_exit_code_at_exit
from halfstep.telemetry.attempt_messages import WatchedStatus

#: Signals that end a process by default: from users, batch systems, limits and timers. For SIGUSR1
#: and SIGUSR2 see `UserSignalFiles`.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGALRM)
#: Modules on the stack of a worker of a pool that waits for a task or exits, ours among them.
POOLS = ("multiprocessing.", "concurrent.futures.", "threading", "copyreg", "halfstep.")
#: Functions that call them: they wait for a task, or exit after the last one.
IDLE = {"worker", "_process_worker", "_bootstrap", "_exit_function"}

#: Module and class of the wrapper in which a pool's worker sends a task's exception.
TASK_ERRORS = (
    ("multiprocessing.pool", "ExceptionWithTraceback"),
    ("concurrent.futures.process", "_ExceptionWithTraceback"),
)

OnEnd: TypeAlias = Callable[[WatchedStatus, str | None, int | None], None]


class ExitHooks:
    """Exit hooks that call `on_end(status, error, exit_code)` unless cancelled.

    status: finished, failed or terminated. error: a traceback, or the text of `sys.exit`.
    exit_code: negative for a signal, None if the script may continue.
    held: while above 0 a signal is deferred and sets is_due; the caller then calls `terminate`.
    """

    def __init__(
        self,
        on_end: OnEnd,
        exit_code_file: Path,
        crash_file: Path,
        on_task_error: Callable[[BaseException], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Install the hooks.

        exit_code_file: receives the exit code, one byte, if Python does not have it in time.
        crash_file: receives the stack at a fatal signal.  on_task_error: called with an exception
        of a pool's task in this process, which continues.  on_error: called with an exception of
        our own.
        """
        self.held, self.is_due, self.handle_error = 0, False, on_error
        self._on_end, self._exit_code_file = on_end, exit_code_file
        self._on_task_error = on_task_error
        self._is_cancelled = False
        self._pid, self._thread = os.getpid(), threading.current_thread()
        self._exit: _Exit | None = None  # the SystemExit that ended the interpreter
        self._last_exit: Callable[[], _Probe | None] = lambda: None
        self._signal, self._is_idle = signal.SIGTERM, False
        self._hooks: list[tuple[Any, str, object, object]] = []
        self._hook(sys, "excepthook", self._uncaught)
        self._hook(threading, "excepthook", self._uncaught_in_thread)
        self._hook(sys, "exit", self._sys_exit)
        self._hook(os, "_exit", self._os_exit)
        atexit.register(self._exits)
        self._child_end = _at_end_of_child(self._child_ends)
        for module, name in TASK_ERRORS if self._child_end else ():
            if hasattr(sys.modules.get(module), name):
                self._hook(sys.modules[module], name, partial(self._task_raised, module, name))
        self._crash = CrashFile(crash_file)
        self._user_signals = UserSignalFiles(crash_file, _is_free)
        self._hook(faulthandler, "enable", self._fault_handler_enabled)
        self._hook(faulthandler, "register", self._fault_handler_registered)
        self._signals = [number for number in SIGNALS if _is_main() and _is_free(number)]
        for number in self._signals:
            signal.signal(number, self._on_terminate)

    def cancel(self) -> None:
        """Remove the hooks, except those that other code has replaced."""
        self._is_cancelled = True
        atexit.unregister(self._exits)
        self._crash.close()
        self._user_signals.close()
        if self._child_end:
            self._child_end.cancel()
        for owner, name, ours, before in self._hooks:
            if getattr(owner, name) == ours:
                setattr(owner, name, before)
        for number in self._signals if _is_main() else ():
            if signal.getsignal(number) == self._on_terminate:
                signal.signal(number, signal.SIG_DFL)

    def on_exception(
        self,
        kind: type[BaseException],
        error: BaseException | None,
        trace: TracebackType | None,
        exit_code: int | None = None,
    ) -> None:
        """Report an exception that ends the run; exit_code: set if it ends the process too."""
        if isinstance(error, SystemExit):
            self._on_exit(_exit_of(error))
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        status: WatchedStatus = "terminated" if issubclass(kind, KeyboardInterrupt) else "failed"
        self._on_end(status, text, exit_code)

    def terminate(self) -> None:
        """Report the signal, then let it kill the process with the default action."""
        self.is_due = False
        if not self._is_cancelled:
            self._on_end("finished" if self._is_idle else "terminated", None, -self._signal)
        signal.signal(self._signal, signal.SIG_DFL)
        os.kill(os.getpid(), self._signal)

    @property
    def is_child(self) -> bool:
        """True in a child process of multiprocessing."""
        return self._child_end is not None

    def _hook(self, owner: object, name: str, ours: object) -> None:
        self._hooks.append((owner, name, ours, getattr(owner, name)))
        setattr(owner, name, ours)

    def _before(self, owner: Any, name: str) -> Any:
        return next(hook[3] for hook in self._hooks if hook[:2] == (owner, name))

    def _exits(self) -> None:
        """Report the outcome at the interpreter's exit."""
        probe = self._last_exit()  # a cycle of references may keep it
        ended = self._exit or (probe.ended if probe else None)
        self._on_exit(ended)
        if ended is None:
            write_exit_code_at_exit(self._exit_code_file)

    def _on_exit(self, ended: "_Exit | None") -> None:
        code = ended.exit_code if ended else 0
        self._on_end("failed" if code else "finished", ended.text if ended else None, code)

    def _child_ends(self) -> None:
        """Report the outcome of a multiprocessing child, with the exception being handled."""
        kind, error, trace = sys.exc_info()
        if kind is None:
            self._on_exit(None)
        else:
            self.on_exception(kind, error, trace, 1)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_cancelled and not hasattr(sys, "ps1"):  # an interactive prompt continues
            is_interrupt = issubclass(kind, KeyboardInterrupt)
            self.on_exception(kind, error, trace, -signal.SIGINT if is_interrupt else 1)
        self._before(sys, "excepthook")(kind, error, trace)

    def _uncaught_in_thread(self, raised: threading.ExceptHookArgs) -> None:
        """Report an exception in the thread that started the run; the process continues."""
        is_own = raised.thread is self._thread and not issubclass(raised.exc_type, SystemExit)
        if is_own and not self._is_cancelled:
            self.on_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
        self._before(threading, "excepthook")(raised)

    def _sys_exit(self, *code: object) -> None:
        try:
            self._before(sys, "exit")(*code)
        except SystemExit as error:
            if not self._is_cancelled and _is_main():
                error.__dict__["_halfstep"] = probe = _Probe(_exit_of(error), self._ends_by)
                self._last_exit = weakref.ref(probe)
            raise

    def _ends_by(self, ended: "_Exit") -> None:
        self._exit = ended

    def _fault_handler_enabled(self, *arguments: object, **named: object) -> None:
        """Hand faulthandler over to the script, which has enabled it."""
        self._crash.leave()
        self._before(faulthandler, "enable")(*arguments, **named)

    def _fault_handler_registered(self, signum: int, *arguments: object, **named: object) -> None:
        """Leave a signal to faulthandler, whose handler Python does not know."""
        self._signals = [number for number in self._signals if number != signum]
        self._user_signals.leave(signum)
        self._before(faulthandler, "register")(signum, *arguments, **named)

    def _task_raised(self, module: str, name: str, error: BaseException, trace: object) -> Any:
        """Report a pool task's exception; replaces the class that wraps it for the parent."""
        if not self._is_cancelled:
            self._on_task_error(error)
        return self._before(sys.modules[module], name)(error, trace)

    def _os_exit(self, status: int) -> None:
        if isinstance(status, int) and os.getpid() == self._pid and not self._is_cancelled:
            code = _truncate(status)
            self._on_end("failed" if code else "finished", None, code)
        self._before(os, "_exit")(status)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        self._is_idle = self.is_child and _is_idle(frame)
        if self.held:  # during an internal call, which ends soon
            self.is_due = True
        else:
            self.terminate()


class _Exit(NamedTuple):
    """Effect of a SystemExit on the process."""

    exit_code: int
    text: str | None  # a traceback, a message, or None


class _Probe:
    """Attribute of a SystemExit that reports it if it was not caught and ended the interpreter.

    A caught one is freed while a Python frame runs; the interpreter's last one is not.
    """

    def __init__(self, ended: _Exit, report: Callable[[_Exit], None]) -> None:
        self.ended, self._report = ended, report

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            self._report(self.ended)


def _exit_of(error: SystemExit) -> _Exit:
    """Return the exit code of a SystemExit, with its text and the traceback of its cause."""
    code = error.code
    if code is None or isinstance(code, int):
        exit_code, text = _truncate(code or 0), None
    else:
        exit_code, text = 1, str(code)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if exit_code and cause is not None and not isinstance(cause, SystemExit | GeneratorExit):
        trace = "".join(traceback.format_exception(cause))
        text = f"{trace}{text}" if text else trace
    return _Exit(exit_code, text if exit_code else None)


def _truncate(code: int) -> int:
    """Return an exit code's low 8 bits; 255 if it is beyond 64 bits, as Python does."""
    return code & 0xFF if -(2**63) <= code < 2**63 else 255


def _at_end_of_child(callback: Callable[[], None]) -> Any:
    """Register a callback for the end of a multiprocessing child, which does not run atexit.

    Returns an object with `cancel`; None in any other process.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return None
    from multiprocessing.util import Finalize

    return Finalize(None, callback, exitpriority=0)


def _is_idle(frame: FrameType | None) -> bool:
    """Return True if a signal interrupted a pool's worker between tasks or at its normal exit."""
    if sys.exc_info()[0] is not None:
        return False
    while frame and (module := frame.f_globals.get("__name__", "")).startswith(POOLS):
        if frame.f_code.co_name in IDLE and module != "threading":
            return True
        frame = frame.f_back
    return False


def _is_free(number: signal.Signals) -> bool:
    """Return True if neither Python nor C code handles a signal."""
    return signal.getsignal(number) is signal.SIG_DFL and not _is_caught(number)


def _is_caught(number: signal.Signals) -> bool:
    """Return True if C code handles a signal, e.g. that of faulthandler.register."""
    with suppress(OSError):  # only Linux has it
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> number - 1 & 1)
    return False


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
