"""Detection of the ends of a notebook's cells, between which the process continues."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Cells:
    """Observer of IPython's cells during a run; outside of IPython it does nothing."""

    def __init__(
        self,
        on_error: Callable[[BaseException], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Register with IPython.

        on_error: called with the exception of each cell that raises one.  on_end: called after
        each cell.
        """
        self._on_end = on_end
        self.has_ended = False  # True once the cell that started the run has ended
        self._on_error = on_error
        self._shell = _shell()
        self._last_shown = _last_shown()
        if self._shell:
            self._shell.events.register("post_run_cell", self._ran)

    def forget(self) -> None:
        """Unregister from IPython."""
        self._last_shown = None
        if self._shell:
            with suppress(ValueError):  # it is no longer registered
                self._shell.events.unregister("post_run_cell", self._ran)

    def _ran(self, result: Any = None) -> None:
        self.has_ended = True
        # An exception of a script run by `%run` is shown, but is not the cell's own exception.
        before, self._last_shown = self._last_shown, _last_shown()
        shown = None if self._last_shown is before else self._last_shown
        error = getattr(result, "error_in_exec", None) or shown
        if error and not (isinstance(error, SystemExit) and not error.code):
            self._on_error(error)
        self._on_end()


def _last_shown() -> BaseException | None:
    """Return the exception whose traceback was last shown, or None."""
    return getattr(sys, "last_value", None)


def _shell() -> Any:
    """Return this process's IPython shell, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython and hasattr(ipython, "get_ipython") else None


def is_notebook() -> bool:
    """Return whether IPython runs this process, as a notebook's kernel or a terminal."""
    return _shell() is not None
