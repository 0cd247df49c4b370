"""Files from which another process later derives the outcome: exit code, and stack of a crash."""

import ctypes
import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import IO

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

    def __init__(self, path: Path) -> None:
        self._path, self._pid = path, os.getpid()
        self._file: IO[bytes] | None = None
        if not faulthandler.is_enabled():
            with suppress(OSError):
                self._file = path.open("wb")
                faulthandler.enable(self._file, all_threads=False)

    def close(self) -> None:
        """Disable faulthandler and close the file; a forked child leaves its parent's file."""
        if self._file is not None:
            faulthandler.disable()
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
