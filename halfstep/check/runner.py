"""Runs a script unchanged, and checks its first steps. This module imports torch."""

import builtins
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from halfstep.check.report import Report
from halfstep.check.rows import relative
from halfstep.check.session import CheckedLoop, CheckedSteps


class ChecksDone(SystemExit):
    """Raised in the script's loop once all steps are checked; its `finally` blocks still run."""


def check_script(
    script: str,
    arguments: list[str],
    schedule: CheckedSteps,
    *,
    is_module: bool = False,
    is_quiet: bool = False,
    reproduce: Path | None = None,
) -> tuple[Report, BaseException | None]:
    """Run a script or module, and return the report with the error that ended it, if any.

    The script runs in this process, with runs of its own `halfstep.watch` switched off.
    is_quiet: what the script prints goes to stderr.  reproduce: folder of scripts that show the
    mistakes with torch alone.
    """
    os.environ["HALFSTEP_MODE"] = "disabled"
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path.cwd() if is_module else Path(script).resolve().parent)]

    def end() -> None:
        if threading.current_thread() is threading.main_thread():
            raise ChecksDone  # elsewhere it would end a thread for whose result the script waits

    error: BaseException | None = None
    loop = CheckedLoop(schedule, on_done=end, keeps_inputs=reproduce is not None)
    with streams(is_quiet=is_quiet), loop:
        try:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except ChecksDone:
            pass
        except SystemExit as ended:
            error = ended if ended.code not in (None, 0) else None
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
    report = loop.report(script if is_module else relative(script))
    if reproduce is not None:
        paths = [str(path) for path in loop.reproduce(reproduce)]
        report = msgspec.structs.replace(report, reproductions=paths)
    return report, error


@contextmanager
def streams(*, is_quiet: bool) -> Iterator[None]:
    """Restore the streams that a script may replace.

    is_quiet: what it and its child processes print goes to stderr.
    """
    kept = sys.stdout, sys.stderr, builtins.print
    descriptor = None
    if is_quiet:
        sys.stdout.flush()
        descriptor = os.dup(1)
        os.dup2(2, 1)
    try:
        yield
    finally:
        for stream in (sys.stdout, kept[0]):
            with suppress(Exception):  # the script may have closed it
                stream.flush()
        sys.stdout, sys.stderr, builtins.print = kept
        if descriptor is not None:
            os.dup2(descriptor, 1)
            os.close(descriptor)
