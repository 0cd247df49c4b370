"""Outcome of a watched run, by the end of the process, `finish()`, or the start of another run."""

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.session import active_run
from halfstep.session.error_guard import ErrorGuard
from halfstep.session.exit_hooks import ExitHooks, OnEnd
from halfstep.session.notebook import Cells
from halfstep.session.queued_run import QueuedRun
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import WatchedStatus
from halfstep.telemetry.run_folder import is_called

if TYPE_CHECKING:
    from halfstep.watching.loop import Loop


class RunOutcome:
    """Outcome of a run, which the first end of several decides."""

    def __init__(
        self,
        files: AttemptFiles,
        queued: QueuedRun | None,
        loop: "Loop",
        guard: ErrorGuard,
        on_end: OnEnd,
        on_cell_end: Callable[[], None],
    ) -> None:
        """Install the hooks. on_cell_end: called after each cell of a notebook."""
        self.has_ended = False
        self._files, self._queued, self._loop = files, queued, loop
        self._guard, self._on_end = guard, on_end
        #: Step, status and error of the notebook cell or pool task that raised last.
        self.part_end: tuple[int, WatchedStatus, str] | None = None
        self.exit_hooks = guard.exit_hooks = ExitHooks(
            self._process_ends, files.exit_code, files.crash, self._part_raised, guard.fail
        )
        self._cells = Cells(self._part_raised, on_cell_end)

    def end(self, status: WatchedStatus, error: str | None, exit_code: int | None = None) -> None:
        """End the run, unless it has ended."""
        if not self.has_ended:
            self._guard.protect(self._on_end, status, error, exit_code)

    def finish(self) -> None:
        """End the run by a call; it has failed if a cell or task raised, and it did not go on."""
        if self.part_end is not None and self.part_end[1] == "terminated":
            self.part_end = None  # the user has interrupted a cell, and keeps the run
        self._end_after_parts("finished")

    def disarm(self) -> None:
        """Restore torch and Python."""
        self.has_ended, active_run.active = True, None
        self._guard.disarm()
        self._cells.forget()

    def is_superseded(self, *names: object) -> bool:
        """End the run if a call of `watch` starts another; return True if it did.

        A later cell of a notebook starts another run. So does another run's name in a child of
        multiprocessing, for example in a pool's next task; elsewhere it is reported.
        """
        if self._queued:
            return False
        if self._cells.has_ended:
            self._end_after_parts("interrupted")
        elif self.exit_hooks.is_child and self._is_other(*names):
            self._end_after_parts("finished")
        elif self._guard.is_on and self._is_other(*names):
            rest = "continues; call `finish()` before starting another run"
            self._guard.complain(f"{self._files.folder} {rest}")
        return self.has_ended

    def _process_ends(
        self, status: WatchedStatus, error: str | None, exit_code: int | None
    ) -> None:
        if status == "finished":
            self._end_after_parts(status, exit_code)
        else:
            self.end(status, error, exit_code)

    def _end_after_parts(self, status: WatchedStatus, exit_code: int | None = None) -> None:
        """End the run with the error of the last cell or task, if that raised."""
        if self.part_end is not None and self.part_end[0] == self._loop.step:
            _step, part_status, error = self.part_end
            self.end(part_status, error)
        else:
            self.end(status, None, exit_code)

    def _part_raised(self, error: BaseException) -> None:
        """Remember the exception of a notebook cell or pool task; the process continues."""
        status: WatchedStatus = "terminated" if isinstance(error, KeyboardInterrupt) else "failed"
        self.part_end = self._loop.step, status, "".join(traceback.format_exception(error))

    def _is_other(self, *names: object) -> bool:
        """Return True if the first non-empty name is another run's."""
        first = next((name for name in names if isinstance(name, str) and name), None)
        return first is not None and not is_called(self._files.folder, first)
