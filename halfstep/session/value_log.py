"""Log of the values that a script and its child processes report."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from halfstep.clock import clock
from halfstep.importing.columns import columns_of
from halfstep.session import arguments
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.stderr import in_a_line
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.events import Metric
from halfstep.telemetry.logged_rows import LoggedRow, rows_of
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.telemetry.plain_json import LARGEST_WHOLE, clean
from halfstep.telemetry.relay import RelayReader
from halfstep.telemetry.spool import Steps

if TYPE_CHECKING:
    from halfstep.watching.loop import Loop

FLUSH_SECONDS = 0.2  # between flushes of logged values while no step ends
EARLY_SECONDS = 0.4  # since a flush, after which another thread writes


class _Logged(NamedTuple):
    """A number that `log` received; on a device, it may not have arrived yet."""

    arrived: Any  # CUDA event of its copy to the host; None: on the host
    step: int
    name: str
    value: Any
    elapsed_ms: int


class ValueLog:
    """Log of a run: numbers wait until they are on the host; files are written at once."""

    def __init__(
        self,
        files: AttemptFiles,
        loop: "Loop",
        spool: PatientSpool,
        on_rows: Callable[[Steps], None],
        on_file: Callable[[str, object, int], None],
        complain: Callable[[str], None],
    ) -> None:
        """on_rows: called with the row of a step.  on_file: called with name, value and step."""
        self.children = RelayReader(files)
        self._loop, self._spool, self._complain = loop, spool, complain
        self._on_rows, self._on_file = on_rows, on_file
        #: Returns the step for numbers that a child process logs without one.
        self.step_of_children: Callable[[], int] = self.last_step
        self._numbers: deque[_Logged] = deque()
        self._logged_step = loop.step
        self._logged_names: set[object] = set()  # at that step, by calls without a step
        self.row_before: tuple[int, int] | None = None  # step and elapsed_ms
        self._row_step = 0  # last one whose row this attempt has logged
        self._flushed_at = clock()

    def next_step(self, names: Iterable[object]) -> int:
        """Return the step of values that are logged without one: the last attempted one.

        Without attempted steps the last logged one; names that it has already begin the next.
        """
        if self._loop.step:
            return self._loop.step
        if self._logged_names & (names := set(names)):
            self._logged_step += 1
            self._logged_names.clear()
        self._logged_names |= names
        return self._logged_step

    def last_step(self) -> int:
        """Return the last step, attempted or logged."""
        return max(self._loop.step, self._logged_step)

    def continue_after(self, step: int) -> None:
        """Let values that are logged without a step follow those of this one."""
        self._logged_step = step + 1

    def log(self, values: Mapping[str, object], step: int, *, makes_row: bool) -> None:
        """Log values by name. makes_row: whether a loss is the row of its step."""
        if step != self._logged_step:
            self._logged_step = step
            self._logged_names.clear()
        if makes_row:
            values = self._without_row(values, step)
        for name, value in values.items():
            try:
                if not isinstance(name, str) or not name.strip():
                    what = f"its name is {in_a_line(name)}; allowed: {arguments.LABEL}"
                    self._complain(f"a value is not logged: {what}")
                elif is_number(value):
                    self._log_number(clean(name), value, step)
                else:
                    self._on_file(clean(name), value, step)
            except Exception as error:  # the library of a figure or table can raise anything here
                self._complain(f"{str(name)[:100]} is not logged: {error}")

    @property
    def is_due(self) -> bool:
        """Whether to flush although no step ends."""
        return clock() - self._flushed_at > FLUSH_SECONDS

    def flush(self) -> None:
        """Write the logged numbers that have arrived on the host."""
        self._flushed_at = clock()
        if self.children.is_due():
            self.receive()
        self._write(lambda logged: logged.arrived is None or logged.arrived.query())

    def flush_early(self) -> None:
        """Write waiting numbers in another thread than the script's, up to the first on a device.

        Other objects are left, too: their conversion may wait for a device.
        """
        if clock() - self._flushed_at > EARLY_SECONDS:
            self._write(_is_plain)

    def _write(self, is_here: Callable[[_Logged], bool]) -> None:
        numbers = self._numbers
        while numbers and is_here(numbers[0]):
            _, step, name, value, elapsed_ms = numbers.popleft()
            try:
                number = float(value)
            except Exception:  # any object that looks like a number
                what = f"it is {in_a_line(value)}; allowed: a number that a float can hold"
                self._complain(f"{name:.100} is not logged: {what}")
                continue
            try:
                self._spool.event(Metric(step=step, name=name, value=number, elapsed_ms=elapsed_ms))
            except Exception as error:  # a name that is too long, for example
                self._complain(f"{name:.100} is not logged: {error}")

    def receive(self) -> None:
        """Read the numbers that child processes have logged."""
        try:
            for numbers, step in self.children.receive():
                at = self.step_of_children() if step is None else step
                for name, value in numbers.items():
                    self._log_number(clean(name), value, at)
        except OSError as error:
            self._complain(f"values of child processes cannot be read: {error}")

    def _without_row(self, values: Mapping[str, Any], step: int) -> Mapping[str, object]:
        """Write the row of a step, if the values have a loss; return the other values."""
        if step <= self._row_step:
            return values
        numbers = {name: float(value) for name, value in values.items() if _is_column(name, value)}
        row = LoggedRow.of(step, self._loop.elapsed_ms(), numbers)
        if row is None:
            return values
        self._on_rows(rows_of([row], self.row_before))
        self._loop.step = self._row_step = row.step
        self.row_before = (row.step, row.elapsed_ms)
        return {name: value for name, value in values.items() if name not in row.columns}

    def _log_number(self, name: str, value: Any, step: int) -> None:
        arrived = None
        if hasattr(value, "detach"):
            value = value.detach()
        value = as_scalar(value)
        if getattr(value, "is_cuda", False):
            import torch

            stream = torch.cuda.current_stream(value.device)
            value = value.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        self._numbers.append(_Logged(arrived, step, name, value, self._loop.elapsed_ms()))


def _is_plain(logged: _Logged) -> bool:
    """Return whether a number is in host memory."""
    value = logged.value
    is_tensor = hasattr(value, "detach") and getattr(value, "is_cpu", False)
    return logged.arrived is None and (is_tensor or isinstance(value, int | float | np.generic))


def _is_column(name: object, value: object) -> bool:
    """Return whether a value is a number of Python or numpy that a step's row may hold."""
    if not isinstance(name, str) or isinstance(value, bool) or not columns_of([name]):
        return False
    if isinstance(value, Integral):
        return abs(int(value)) <= LARGEST_WHOLE
    is_numpys = isinstance(value, Real) and type(value).__module__ == "numpy"
    return is_numpys or isinstance(value, float | Decimal)
