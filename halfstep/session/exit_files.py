"""Files from which another process later derives the outcome: exit code, and stack of a crash."""

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from halfstep import batch_system

#: By the beginning of faulthandler's text after "Fatal Python error: ".
FATAL_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
CRASH_CHARACTERS = 100_000


class CrashFile:
    """File for faulthandler's stack at a fatal signal, unless the script has enabled it."""

    def __init__(self, path: Path, number: signal.Signals | None = None) -> None:
        """number: of a user signal instead of the fatal ones."""
        self._path, self._pid, self._number = path, os.getpid(), number
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            if number is not None:
                self._file = path.open("wb")
                # With `chain` the signal then has the effect that it had.
                faulthandler.register(number, self._file, all_threads=False, chain=True)
            elif not faulthandler.is_enabled():
                self._file = path.open("wb")
                faulthandler.enable(self._file, all_threads=False)

    def close(self) -> None:
        """Disable faulthandler and close the file; a forked child leaves its parent's file."""
        if self._file is None:
            return
        if self._number is None:
            faulthandler.disable()
        else:
            faulthandler.unregister(self._number)
        self.leave()

    def leave(self) -> None:
        """Close the file, and delete it if it is empty and this process created it."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self._pid == os.getpid():
            with suppress(OSError):
                if not self._path.stat().st_size:
                    self._path.unlink()


class UserSignalFiles:
    """Files for faulthandler's stack at a user signal of a batch system, which ends the process.

    faulthandler's handler is one of C: Python, and so a script that installs its own handler where
    it finds none, sees none.
    """

    def __init__(self, path: Path, is_free: Callable[[signal.Signals], bool]) -> None:
        """is_free: returns whether nothing handles a signal."""
        self._files: dict[signal.Signals, CrashFile] = {}
        for number in batch_system.USER_SIGNALS if batch_system.job() else ():
            with suppress(OSError):
                if is_free(number):
                    self._files[number] = CrashFile(_of_signal(path, number), number)

    def leave(self, number: int) -> None:
        """Leave a signal to other code, which has not taken it yet."""
        if file := self._files.pop(signal.Signals(number), None):
            file.close()

    def close(self) -> None:
        """Restore the signals that the script has not taken."""
        for number, file in self._files.items():
            # Unregistering would replace a handler that the script has installed since.
            if signal.getsignal(number) is signal.SIG_DFL:
                file.close()
            else:
                file.leave()
        self._files = {}


def user_signal_of(path: Path) -> int | None:
    """Return the user signal that killed a process, negative; None if none is recorded."""
    for number in batch_system.USER_SIGNALS:
        with suppress(OSError):
            if _of_signal(path, number).stat().st_size:
                return -number
    return None


def _of_signal(path: Path, number: signal.Signals) -> Path:
    return path.with_name(f"{path.name}-{number.name}")


def crash_of(path: Path) -> tuple[int, str] | None:
    """Return the signal that killed a process, negative, and its stack; None if not written."""
    try:
        written = path.read_text(errors="replace")[:CRASH_CHARACTERS]
    except FileNotFoundError:
        return None
    first, _, stack = written.partition("\n")
    what = first.removeprefix("Fatal Python error: ")
    for beginning, number in FATAL_SIGNALS.items():
        if what.startswith(beginning):
            return -number, f"{stack.strip()}\n{first} ({number.name})"
    return None


def write_exit_code_at_exit(path: Path) -> None:
    """Have the C library write the exit code, one byte, to a file at the very end.

    `raise SystemExit(3)` and `exit(3)` end Python without calling a hook with the code.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):  # only glibc has it
        return
    libc.fopen.restype = ctypes.c_void_p
    if file := libc.fopen(os.fsencode(path), b"wb"):
        stream = ctypes.c_void_p(file)
        libc.setbuf(stream, None)
        libc.on_exit(libc.fputc, stream)  # calls fputc(exit code, stream)
