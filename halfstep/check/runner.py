"""Runs a script unchanged, and checks its first steps. This module imports torch."""

import os
import runpy
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch

from halfstep.check.report import Report, relative, rows_of
from halfstep.check.session import CheckedLoop, Schedule


class ChecksDone(SystemExit):
    """Raised in the script's loop once all steps are checked; its `finally` blocks still run."""


def check_script(
    script: str,
    arguments: list[str],
    schedule: Schedule,
    *,
    is_module: bool = False,
    is_quiet: bool = False,
) -> tuple[Report, BaseException | None]:
    """Run a script or module, and return the report with the error that ended it, if any.

    The script runs in this process, with runs of its own `halfstep.watch` switched off.
    is_quiet: what the script prints goes to stderr.
    """
    os.environ["HALFSTEP_MODE"] = "disabled"
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path.cwd() if is_module else Path(script).resolve().parent)]

    def end() -> None:
        raise ChecksDone

    error: BaseException | None = None
    loop = CheckedLoop(schedule, on_done=end)
    with loop, redirect_stdout(sys.stderr) if is_quiet else nullcontext():
        try:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except ChecksDone:
            pass
        except SystemExit as ended:
            error = ended if ended.code not in (None, 0) else None
        except Exception as raised:
            error = raised
    unexamined = loop.unexamined()
    calls, others = loop.calls.mistakes()
    report = Report(
        script=script if is_module else relative(script),
        torch=str(torch.__version__),
        steps=loop.steps,
        rows=rows_of(calls, loop.found(), others),
        unknown_operators=unexamined.operators,
        errors=unexamined.errors,
    )
    return report, error
