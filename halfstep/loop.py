"""A training loop that is not ours, step by step, as the taps tell of it.

A row of the ring closes at each `GradScaler.update()`: its step's loss is the mean of what was
scaled since the last row. Of a loop without a scaler, a row closes when each optimizer known has
stepped once. Nothing in here waits for the device, but for a new optimizer in the midst of a run.
This module imports torch.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.diagnoses import Diagnoses, Intervals
from halfstep.gradients import Gradients, module_names, parameter_names
from halfstep.open_row import OpenRow, Value, kept_loss, mean
from halfstep.ring import Ring
from halfstep.ring_rows import SCALE, SCALE_AFTER, Rows
from halfstep.schedule import ScheduleWatch
from halfstep.spool import Event, Steps

RELAY_SECONDS = 30.0  # for a device to finish its rows before they are laid out anew
PRIVATE = ("_per_optimizer_states", "_scale", "_growth_tracker")
NEVER = Intervals()


class Loop:
    """Writes a row a step, and hands over what rows say once they have arrived."""

    def __init__(
        self,
        on_steps: Callable[[Steps], None],
        on_event: Callable[[Event], None],
        *,
        optimizers: Mapping[str, Optimizer] | None = None,
        scaler: GradScaler | None = None,
        step: int = 0,
        started_at: float | None = None,
        every: Intervals = NEVER,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """optimizers, scaler: the only ones to hear; None: all.  step: done already.

        started_at: what elapsed_ms counts from, by halfstep.clock; now if not told.  every: how
        often it is asked for more.  say: told a line when that is given up.
        """
        self.step = step  # the last one closed
        self._on_steps, self._on_event = on_steps, on_event
        self._wanted = None if optimizers is None else {id(o): n for n, o in optimizers.items()}
        self._scaler = scaler
        self._names: dict[nn.Parameter, str] = {}
        self._known: dict[int, Gradients] = {}  # by an optimizer's id, which they keep alive
        self.under_scaler: set[int] = set()  # ids of optimizers that an enabled scaler steps
        self.on_scaler: Callable[[], None] = lambda: None
        self._schedule = ScheduleWatch()
        self._rows = Rows({}, layers_every=every.layers)
        self._has_layers = every.layers > 0
        wants_more = every.histogram or every.headroom
        self._diagnoses = Diagnoses(every, on_event, say) if wants_more else None
        self._ring: Ring | None = None
        self._started_at = clock() if started_at is None else started_at
        self._step_started: float | None = None
        self._open: dict[int, OpenRow] = {}  # by a scaler's id
        self._unscaled = OpenRow()  # of steps without a scaler
        self._current = self._unscaled  # the row of the scaler heard last
        self._scalers = 0  # that have updated
        self._told: list[Value] = []  # losses of the open row, in place of what is scaled

    def add(self, modules: tuple[nn.Module, ...]) -> None:
        """Call parameters as these modules do."""
        self._names |= parameter_names(modules)
        if self._diagnoses:
            self._diagnoses.add(module_names(modules))
            self._diagnoses.starts(self.step + 1)

    def end(self) -> None:
        """Leave torch as it was."""
        if self._diagnoses:
            self._diagnoses.end()

    def add_loss(self, loss: Tensor | float) -> None:
        """Take this for the next row's loss, rather than what is scaled; the mean of several."""
        self._start()
        self._told.append(kept_loss(loss))

    def elapsed_ms(self) -> int:
        """Return milliseconds since the loop was first heard."""
        return int((clock() - self._started_at) * 1000)

    def drain(self, patience_seconds: float) -> bool:
        """Hand over what the device has; tell whether that was all."""
        has_all = self._ring is None or self._ring.drain(patience_seconds)
        if self._diagnoses:
            self._diagnoses.report(wait=has_all)
        return has_all

    # ---- What the taps tell, in the order of a step -------------------------------------------

    def scaled(self, scaler: GradScaler, outputs: Any) -> None:
        """Take part in the mean of the row's losses."""
        row = self._open.get(id(scaler)) or self._heard(scaler)
        if row is None:
            return
        if row is not self._current:
            if self._current is self._unscaled:
                self.on_scaler()
            self._current = row
        for loss in [outputs] if isinstance(outputs, Tensor) else outputs:
            if loss.requires_grad:  # others scale a 1, to read the scale
                row.losses.append(kept_loss(loss))

    def propagated(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """The same where nothing is scaled."""
        if self._current is self._unscaled:
            self._start()
            self._unscaled.losses.append(kept_loss(loss))

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Measure gradients, before a clip can spread a NaN over them."""
        if row := self._open.get(id(scaler)) or self._heard(scaler):
            self.under_scaler.add(id(optimizer))
            self._measure(row, optimizer)

    def checked(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """The same, of gradients that are still times the scale."""
        if row := self._open.get(id(scaler)) or self._heard(scaler):
            self.under_scaler.add(id(optimizer))
            self._measure(row, optimizer, scaler._scale)

    def updating(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Read flags and scale, which this call is about to change in place."""
        row = self._open.get(id(scaler)) or self._heard(scaler)
        if row is None:
            return
        if row.number is None:
            row.number, self._scalers = self._scalers, self._scalers + 1
        scale, ring = scaler._scale, self._ring
        if ring is None or scale is None:
            return
        for optimizer, state in scaler._per_optimizer_states.items():
            if optimizer in row.measured:
                flags = state["found_inf_per_device"]
                row.found_inf[optimizer] = _joint(flags, ring.is_on_host)
        if row.found_inf:
            if ring.is_on_host or scale.is_cpu:
                row.scale = scale.item()
            else:
                row.scale = scale
                self._write(row, scale)

    def updated(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Close the row. A scale given by hand shows in the next one, as set."""
        row, ring = self._open.get(id(scaler)), self._ring
        if row is None or not row.found_inf or ring is None or (after := scaler._scale) is None:
            return
        if ring.is_on_host or after.is_cpu:
            self._write(row, after.item() if new_scale is None else row.scale)
        elif new_scale is None:
            ring.row[SCALE_AFTER].copy_(after)
        self._close(row)

    def stepped(self, optimizer: Optimizer) -> None:
        """Of an optimizer that no scaler steps: measure it, and close the row if it is whole."""
        identity = id(optimizer)
        if not self._is_wanted(optimizer):
            return
        is_alone = self._current is self._unscaled
        if is_alone and identity in self._unscaled.measured:
            self._close_unscaled()  # the others rest in this step
        row = self._current
        self._measure(row, optimizer)
        expected = self._known.keys() if self._wanted is None else self._wanted.keys()
        if is_alone and row.measured.keys() == expected:
            self._close_unscaled()

    # ---- Rows ---------------------------------------------------------------------------------

    def _measure(self, row: OpenRow, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        identity = id(optimizer)
        if self._wanted is not None and identity not in self._wanted:
            return
        gradients = self._known.get(identity)
        if gradients is None or len(optimizer.param_groups) != gradients.groups:
            gradients = self._meet(optimizer)
            row.measured.pop(identity, None)  # of fewer parameters
        if row.rate is None:
            row.rate = gradients.rate()
        if measured := gradients.measure(scale):
            row.measured[identity] = measured
            if self._diagnoses:
                self._diagnoses.measured(self.step + 1, row, gradients, scale)

    def _start(self) -> None:
        if self._step_started is None:
            self._step_started = time.perf_counter()

    def _meet(self, optimizer: Optimizer) -> Gradients:
        """Know an optimizer from here on, or anew; the rows have to be laid out for it."""
        self._start()
        known = self._known.get(id(optimizer))
        name = self._name(optimizer) if known is None else known.name
        gradients = Gradients(optimizer, name, self._names)
        if self._ring is not None and not self._ring.drain(RELAY_SECONDS):
            raise RuntimeError(f"the device has not finished its steps in {RELAY_SECONDS:g} s")
        self._known[id(optimizer)] = gradients
        has_rates = isinstance(gradients.rate(), Tensor)
        names = {each.name: each.names for each in self._known.values()}
        self._rows = self._rows.relaid(names, has_rates=has_rates)
        self._ring = Ring(
            self._rows.columns,
            self._rows.scalars,
            gradients.device,
            self._started_at,
            self._hand_over,
        )
        return gradients

    def _name(self, optimizer: Optimizer) -> str:
        if self._wanted is not None:
            return self._wanted[id(optimizer)]
        name = type(optimizer).__name__
        others = [type(each.optimizer).__name__ for each in self._known.values()]
        return f"{name}{others.count(name) + 1}" if name in others else name

    def _write(self, row: OpenRow, scale_after: Value) -> None:
        """Write a row: on a CPU its numbers, else by two kernels."""
        ring = self._ring
        if ring is None:
            return
        found: list[Value] = []
        totals: list[Value] = []
        for identity, gradients in self._known.items():
            found.append(row.found_inf.get(identity, 0.0))
            if measured := row.measured.get(identity):
                total, _norms, _factor, counts = measured
                totals.append(total)
                if counts:
                    self._rows.count(ring.number, gradients.name, counts)
            else:
                totals.append(0.0)
        losses = self._told or row.losses
        loss = losses[0] if len(losses) == 1 else mean(losses)
        rate = row.rate
        if rate is None or isinstance(rate, float):
            rate = 0.0  # for the host knows it
        elif ring.is_on_host:
            rate = rate.item()  # the schedule may change it in place before the row is read
        values = [loss, row.scale, scale_after, rate, *found, *totals, *totals]
        if not ring.is_on_host:
            self._queue(ring.row, row, values)
            return
        ring.values = values  # what lies on another device is waited for
        if self._has_layers and self._rows.is_for_layers(self.step + 1):
            self._rows.hold(ring.number, self._norms(row))

    def _norms(self, row: OpenRow) -> list[float]:
        norms: list[float] = []
        for identity, gradients in self._known.items():
            measured = row.measured.get(identity)
            if measured is None or isinstance(measured[1], Tensor):
                norms += [0.0] * len(gradients.names)
            else:
                _total, own, factor, _counts = measured
                norms += [norm / factor for norm in own]
        return norms

    def _queue(self, target: Tensor, row: OpenRow, values: list[Value]) -> None:
        """Have the device write a row's scalars, and norms of parameters behind them."""
        norms = [
            row.measured[identity][1] if identity in row.measured else gradients.no_norms
            for identity, gradients in self._known.items()
        ]
        scalars = torch.stack([_tensor(value, target.device) for value in values])
        torch.cat([scalars, *(_tensor(each, target.device) for each in norms)], out=target)

    def _close_unscaled(self) -> None:
        self._write(self._unscaled, 1.0)
        self._close(self._unscaled)

    def _close(self, row: OpenRow) -> None:
        """End the row: from here on the next step's time runs."""
        ring = self._ring
        if ring is None or self._step_started is None:
            return
        self.step += 1
        if row.number:
            self._rows.belongs(ring.number, row.number)
        if self._diagnoses:
            scale = row.scale if ring.is_on_host else ring.row[SCALE]
            self._diagnoses.closed(self.step, row, scale)
        rate = row.rate if isinstance(row.rate, float) else 0.0
        row.clear()
        if self._told:
            self._told = []
        self._step_started = ring.close(self.step, self._step_started, rate)

    def _hand_over(self, first: int, rows: NDArray[np.float32], records: Steps) -> None:
        events = self._rows.read(first, rows, records)
        self._on_steps(records)
        for event in (*events, *self._schedule.read(records)):
            self._on_event(event)
        if self._diagnoses:
            self._diagnoses.report()

    def _heard(self, scaler: GradScaler) -> OpenRow | None:
        """Return the row of a scaler that is new, if it is one to hear."""
        if not scaler._enabled or self._scaler not in (None, scaler):
            return None
        _check_attributes(scaler)
        self._start()
        row = self._open[id(scaler)] = OpenRow(scaler)
        return row

    def _is_wanted(self, optimizer: Optimizer) -> bool:
        return self._wanted is None or id(optimizer) in self._wanted


def _check_attributes(scaler: GradScaler) -> None:
    """Raise if torch's scaler is not built as those are that we know."""
    if missing := [name for name in PRIVATE if not hasattr(scaler, name)]:
        raise AttributeError(
            f"torch {torch.__version__}'s {type(scaler).__name__} has no {', '.join(missing)}, "
            "from which skips and scale are read; which torch is supported, docs/watch.md says"
        )


def _joint(flags: Mapping[torch.device, Tensor], is_read: bool) -> Value:
    """Return one flag of those of several devices: a number, or a tensor of the first one.

    is_read: the host reads all that it can of a step, and waits for the rest.
    """
    first, *others = flags.values()
    for other in others:
        first = first + other.to(first.device, non_blocking=True)
    return first.item() if is_read or (first.is_cpu and not others) else first.reshape(())


def _tensor(value: Value | list[float], device: torch.device) -> Tensor:
    """Return a value as a tensor of this device, without a wait."""
    if isinstance(value, float):
        return torch.full((), value, device=device)
    return torch.as_tensor(value).to(device, torch.float32, non_blocking=True)
