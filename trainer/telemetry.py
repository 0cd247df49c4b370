"""What each step was like, measured on the device and brought to the host without a wait.

The loop writes one row a step into a ring on the device. Now and then the rows that are complete
are copied to pinned memory behind the work already queued; an event, polled at step boundaries,
says when they have arrived. The host never waits for the device, except before a checkpoint and
at the end, where it waits anyway. On a CPU the ring is host memory, and is read directly.

    row, fp32:  [loss, scale before, scale after, learning rate, found_inf ×O, total norm ×O,
                 clipped norm ×O, (inf count, NaN count) ×P]
                O optimizers, P parameters in the order of the optimizers, then of the modules;
                the counts are int32, carried bit by bit

What it costs: beside what the clip needs anyway, two kernels a step for the row and one for each
optimizer's flag. The counts are dear and rarely wanted. On a CPU, where the norm can be read
without waiting, they are taken only where it is not finite. On a GPU they are taken in every step,
in about ten kernels for each 4 million gradients, however many parameters share them.
"""

import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.config import Training
from halfstep.recipe import RecipeError
from halfstep.spool import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    SKIPPED,
    STEP_DTYPE,
    Event,
    Steps,
    optimizer_skipped,
)
from trainer.observers import Observer

RING_ROWS = 1024  # must exceed what is drained at once plus what may be in flight
DRAIN_ROWS = 256
DRAIN_SECONDS = 0.2
LOSS, SCALE, SCALE_AFTER, RATE, FOUND_INF = 0, 1, 2, 3, 4  # columns; the others follow
COUNTED_AT_ONCE = 2**22  # elements: 16 MiB of fp32 gradients and as much of running counts
CLIP_EPSILON = 1e-6  # added to the norm by clip_grads_with_norm_

#: What the host knows of a step, in the layout of STEP_DTYPE: step, elapsed_ms, step_us and lr.
KNOWN = struct.Struct("<qqi16xd4x")


class Update(NamedTuple):
    """What became of one optimizer in one step: tensors on the device, not read by the host."""

    found_inf: Tensor  # 0-dim: 1 if the scaler skipped it
    total_norm: Tensor  # 0-dim: L2 over all its gradients, unscaled, before the clip
    clipped_norm: Tensor  # 0-dim: after the clip by value, if there is one; else total_norm
    counts: Tensor  # (2P,) int32: inf and NaN in each parameter's gradient


class StepResult(NamedTuple):
    """What became of one step."""

    loss: Tensor  # 0-dim, as all of these
    scale: Tensor  # the one used for this step
    scale_after: Tensor
    updates: dict[str, Update]  # every optimizer; one that took no part has zeros
    stepped: set[str]  # the optimizers that took part
    rate: float | Tensor = 0.0  # learning rate: a tensor where only the device knows it
    losses: int = 1  # how often training_step yielded


class WatchedOptimizer:
    """An optimizer that says whether the scaler skipped it, as a tensor, not by asking the device.

    A fused optimizer is always called: during its step it carries `found_inf`, on the device,
    and skips inside its kernel. An unfused one is called only if nothing was found, after the
    scaler has asked the device (that wait is PyTorch's own). One pre-hook tells all cases apart.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.names = list(parameters)  # in forward order
        self.parameters = list(parameters.values())
        device = self.parameters[0].device
        self._is_on_cpu = device.type == "cpu"
        self._zero, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._found_inf = self._zero
        self._no_counts = torch.zeros(2 * len(self.names), dtype=torch.int32, device=device)
        # The result of a step in which the recipe yields no loss for this optimizer.
        self.idle = Update(self._zero, self._zero, self._zero, self._no_counts)
        optimizer.register_step_pre_hook(self._keep_found_inf)

    def drop_gradients(self) -> None:
        """Forget all gradients, as `zero_grad(set_to_none=True)` does, without its profiling."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norms(self) -> Tensor:
        """Return the L2 norm of each parameter's gradient, (P,) in fp32; 0 where there is none."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            raise RecipeError(
                f"the loss reached no parameter of its optimizer: {', '.join(self.names)} have no "
                "gradient. Does training_step detach the model's output, or name another optimizer?"
            )
        norms = iter(torch._foreach_norm(gradients))
        return torch.stack([self._zero if p.grad is None else next(norms) for p in self.parameters])

    def step(self, scaler: GradScaler) -> Tensor:
        """Let the scaler step or skip; return found_inf, 0-dimensional: 1 if it skipped."""
        self._found_inf = self._one  # stands if the hook does not run: an unfused skip
        scaler.step(self.optimizer)
        return self._found_inf

    def count_nonfinite(self, total_norm: Tensor, scaler: GradScaler) -> Tensor:
        """Return (2P,) int32: the elements that are inf and that are NaN, parameter by parameter.

        Call it before the clip, which would spread one NaN over all gradients. On a CPU it counts
        only if the total norm is not finite; without a scaler, which skips nothing, never.
        """
        if not scaler.is_enabled():
            return self._no_counts
        if self._is_on_cpu and math.isfinite(total_norm.item()):  # in host memory: nobody waits
            return self._no_counts
        gradients = [self._zero if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([_counts(bucket) for bucket in _buckets(gradients)]).flatten()

    def _keep_found_inf(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        # Cloned, because scaler.update() adds other optimizers' flags to it in place.
        self._found_inf = self._zero if found_inf is None else found_inf.clone()


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split gradients, in order, into runs of COUNTED_AT_ONCE elements; a larger one is alone."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(g.numel() for g in bucket) + gradient.numel() > COUNTED_AT_ONCE:
            yield bucket
            bucket = []
        bucket.append(gradient)
    yield bucket


def _counts(gradients: list[Tensor]) -> Tensor:
    """Return (len(gradients), 2) int32: infs and NaNs. The kernels' number does not grow with it.

    A running count over all of them, read where each one ends; nothing asks the host.
    """
    if len(gradients) == 1:
        [only] = gradients
        return torch.stack([only.isinf().sum(), only.isnan().sum()]).to(torch.int32)[None]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    ends = list(accumulate(g.numel() for g in gradients))
    columns = []
    for flags in (flat.isinf(), flat.isnan()):
        running = flags.cumsum(0, dtype=torch.int32)
        at_ends = torch.stack([running[end - 1] for end in ends])
        columns.append(torch.diff(at_ends, prepend=at_ends.new_zeros(1)))
    return torch.stack(columns, dim=1)


class Telemetry(Observer):
    """The ring, its way to the host, and what the host makes of it: records and scaler events."""

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        device: torch.device,
        training: Training,
        on_steps: Callable[[Steps], None],
        on_event: Callable[[Event], None],
        started_at: float,
    ) -> None:
        """on_steps: what to do with records that have arrived.  started_at: by halfstep.clock."""
        self._optimizers = optimizers
        self._training = training
        self._started_at = started_at
        self._step, self._step_started, self._rate = 0, 0.0, 0.0
        self._on_steps, self._on_event = on_steps, on_event
        self.skipped = 0  # steps in which any optimizer was skipped, as far as drained
        columns = FOUND_INF + sum(3 + 2 * len(each.names) for each in optimizers.values())
        self._zero = torch.zeros((), device=device)
        self._ring = torch.zeros(RING_ROWS, columns, device=device)
        self._rows = self._ring.unbind(0)  # views, made once
        self._records = np.zeros(RING_ROWS, STEP_DTYPE)  # beside the ring: what the host knows
        self._known = self._records.data.cast("B")  # the same, to pack into
        self._last_scale: np.float32 | None = None  # after the last row handed over
        self._skip_flags = [SKIPPED | optimizer_skipped(i) for i in range(len(optimizers))]
        self._written = self._sent = self._read = 0  # rows, ever: read ≤ sent ≤ written
        self._drained_at = time.monotonic()
        self._pinned: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._arrivals: NDArray[np.float32] | None = None  # where the host reads: a view of either
        if device.type == "cuda":
            self._pinned = torch.empty(RING_ROWS, columns, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Hand over what is left. After an error the device may be lost: that error goes first."""
        with suppress(*([RuntimeError] if kind else [])):
            self.drain()

    def elapsed_ms(self) -> int:
        """Return milliseconds since the run's first start."""
        return int((clock() - self._started_at) * 1000)

    def state_dict(self) -> dict[str, float | None]:
        """Return the last scale told of: one set at this very boundary is not, as yet."""
        return {"last_scale": None if self._last_scale is None else float(self._last_scale)}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Put it back, so that the next step tells of a scale that was set."""
        scale = state["last_scale"]
        self._last_scale = None if scale is None else np.float32(scale)

    def before_step(self, step: int) -> None:
        """Start the step's time."""
        self._step, self._step_started = step, time.perf_counter()

    def after_step(self, result: StepResult) -> None:
        """Queue this step's row on the device: two kernels, and no wait."""
        updates = result.updates.values()
        scalars = [
            result.loss,
            result.scale,
            result.scale_after,
            result.rate if isinstance(result.rate, Tensor) else self._zero,
            *[update.found_inf for update in updates],
            *[update.total_norm for update in updates],
            *[update.clipped_norm for update in updates],
        ]
        counts = [update.counts.view(torch.float32) for update in updates]
        self._rate = 0.0 if isinstance(result.rate, Tensor) else result.rate
        row = self._rows[self._written % RING_ROWS]
        torch.cat([torch.stack(scalars), *counts], out=row)

    def tick(self) -> None:
        """End the step's time, and hand over what is due.

        On CUDA the host runs ahead of the device until the launch queue is full: a single time is
        how long queueing took, and the mean of many is the device's own pace.
        """
        step_us = min(int((time.perf_counter() - self._step_started) * 1e6), 2**31 - 1)
        at = self._written % RING_ROWS * KNOWN.size
        KNOWN.pack_into(self._known, at, self._step, self.elapsed_ms(), step_us, self._rate)
        self._written += 1
        due = time.monotonic() - self._drained_at >= DRAIN_SECONDS
        self._receive(wait=self._written - self._read == RING_ROWS)
        if due or self._written - self._sent >= DRAIN_ROWS:
            self._send()

    def drain(self) -> None:
        """Wait for the device and hand over every row written so far."""
        self._receive(wait=True)
        self._send()
        self._receive(wait=True)

    def _send(self) -> None:
        """Start to copy the rows not sent yet, unless the last copy is still under way."""
        if self._sent != self._read:
            return
        self._drained_at = time.monotonic()
        if self._pinned is None or self._arrived is None:
            self._sent = self._written
            self._hand_over()
            return
        # On the same stream as the steps: the rows are complete when the copy begins, and copied
        # before a later step can write over them.
        for rows in _slices(self._sent, self._written):
            self._pinned[rows].copy_(self._ring[rows], non_blocking=True)
        self._arrived.record()
        self._sent = self._written

    def _receive(self, *, wait: bool) -> None:
        if self._sent == self._read or self._pinned is None or self._arrived is None:
            return
        if wait:
            self._arrived.synchronize()
        if self._arrived.query():  # type: ignore[no-untyped-call]
            self._hand_over()

    def _hand_over(self) -> None:
        if self._read == self._sent:
            return
        slices = _slices(self._read, self._sent)
        if self._arrivals is None:
            self._arrivals = (self._ring if self._pinned is None else self._pinned).numpy()
        rows, records = _copied(self._arrivals, slices), _copied(self._records, slices)
        self._read = self._sent
        events = self._interpret(rows, records)
        self._on_steps(records)
        for event in events:
            self._on_event(event)

    def _interpret(self, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Fill the records in from the rows, and say what the scaler did."""
        count = len(self._optimizers)
        is_uneventful = self._is_uneventful(rows)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]  # (steps, O)
        clipped = rows[:, FOUND_INF + 2 * count : FOUND_INF + 3 * count]  # (steps, O)
        if self._training.max_grad_norm is not None and self._training.max_grad_value is None:
            # inf × 0 is NaN here as it is on the device.
            with nullcontext() if is_uneventful else np.errstate(all="ignore"):
                clipped = _clip(totals, self._training.max_grad_norm)
        records["loss"], records["scale"] = rows[:, LOSS], rows[:, SCALE]
        records["grad_norm"], records["grad_norm_clipped"] = _joint(totals), _joint(clipped)
        if self._training.schedule_counts == "applied":
            records["lr"] = rows[:, RATE]
        return [] if is_uneventful else self._events(rows, records)

    def _is_uneventful(self, rows: NDArray[np.float32]) -> bool:
        """Whether all is finite and the scale as it was: nearly always, so it has to be cheap."""
        count = len(self._optimizers)
        scales = rows[:, SCALE : SCALE_AFTER + 1]
        found_inf = rows[:, FOUND_INF : FOUND_INF + count]
        return bool(
            (scales == self._last_scale).all()
            and not found_inf.any()
            and np.isfinite(rows[:, : FOUND_INF + 2 * count]).all()
        )

    def _events(self, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Flag the records, and list the scaler's events."""
        count = len(self._optimizers)
        found_inf = rows[:, FOUND_INF : FOUND_INF + count] != 0  # (steps, O)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]
        bits = np.ascontiguousarray(rows[:, FOUND_INF + 3 * count :])
        counts = bits.view(np.int32).reshape(len(rows), -1, 2)  # (steps, P, 2)

        # Finite gradients above about 1.8e19 have an infinite L2 norm; that is no skip.
        overflows = (np.isinf(totals) & ~found_inf).any(axis=1)
        flags = np.bitwise_or.reduce(np.where(found_inf, self._skip_flags, 0), axis=1)
        flags |= np.where(np.isfinite(rows[:, LOSS]), 0, NONFINITE_LOSS)
        records["flags"] = flags | np.where(overflows, NORM_OVERFLOW, 0)
        self.skipped += int(np.count_nonzero(flags & SKIPPED))

        before, after = rows[:, SCALE], rows[:, SCALE_AFTER]
        # A scale that is not the one which the step before left was set by hand in between.
        left = np.roll(after, 1)
        left[0] = before[0] if self._last_scale is None else self._last_scale
        self._last_scale = after[-1]
        events: list[Event] = []
        for i in np.flatnonzero(found_inf.any(axis=1) | (left != before) | (before != after)):
            if left[i] != before[i]:
                events.append(_event("set", records[i], float(left[i]), float(before[i])))
            events += self._scaler_events(records[i], rows[i], found_inf[i], counts[i])
        return events

    def _scaler_events(
        self,
        record: np.void,
        row: NDArray[np.float32],
        found_inf: NDArray[np.bool_],
        counts: NDArray[np.int32],
    ) -> list[Event]:
        before, after = float(row[SCALE]), float(row[SCALE_AFTER])
        events, first = [], 0
        for (name, watched), was_skipped in zip(self._optimizers.items(), found_inf, strict=True):
            own = slice(first, first + len(watched.names))
            first = own.stop
            if was_skipped:
                culprits = [
                    {"name": name, "inf": int(inf), "nan": int(nan)}
                    for name, (inf, nan) in zip(watched.names, counts[own], strict=True)
                    if inf or nan
                ]
                skip = {"optimizer": name, "culprits": culprits}
                events.append(_event("skip", record, before, after) | skip)
        if after != before:
            kind = "growth" if after > before else "backoff"
            events.append(_event(kind, record, before, after))
        return events


def _event(kind: str, record: np.void, before: float, after: float) -> Event:
    return {
        "event": "scaler",
        "kind": kind,
        "step": int(record["step"]),
        "optimizer": None,
        "scale_before": before,
        "scale_after": after,
        "culprits": [],
        "loss_nonfinite": bool(record["flags"] & NONFINITE_LOSS),
    }


def _clip(totals: NDArray[np.float32], limit: float) -> NDArray[np.float32]:
    """Return what clip_grads_with_norm_ leaves of the norms, as it reckons."""
    coefficient = np.float32(limit) / (totals + np.float32(CLIP_EPSILON))
    clipped: NDArray[np.float32] = totals * np.minimum(coefficient, np.float32(1))
    return clipped


def _joint(norms: NDArray[np.float32]) -> NDArray[Any]:
    """Return one L2 norm over all optimizers, (steps,), of each one's, (steps, O)."""
    if norms.shape[1] == 1:
        return norms[:, 0]
    joint: NDArray[Any] = np.sqrt(np.square(norms, dtype=np.float64).sum(axis=1))
    return joint


def watched_optimizers(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, WatchedOptimizer]:
    """Return each optimizer, watched; its parameters named "<module>.<parameter>" in forward order.

    Raises RecipeError for parameters that AMP cannot train: in half precision, or in no module.
    """
    names = {
        parameter: f"{module}.{name}"
        for module, network in modules.items()
        for name, parameter in network.named_parameters()
    }
    watched = {}
    for optimizer_name, optimizer in optimizers.items():
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if strangers := own - names.keys():
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers)
            raise RecipeError(
                f'optimizer "{optimizer_name}" has parameters of shape {shapes} that are in none '
                f"of the recipe's modules ({', '.join(modules)}): they could not be saved"
            )
        parameters = {name: parameter for parameter, name in names.items() if parameter in own}
        for name, parameter in parameters.items():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise RecipeError(
                    f"parameter {name} is {parameter.dtype}: leave the model in torch.float32 "
                    "(no .half()); autocast casts where it is safe. A fused optimizer would "
                    "accept half-precision gradients in silence, and lose small updates"
                )
        watched[optimizer_name] = WatchedOptimizer(optimizer, parameters)
    return watched


def _copied(ring: NDArray[Any], slices: list[slice]) -> NDArray[Any]:
    """Return these rows of a ring in a row of their own."""
    return ring[slices[0]].copy() if len(slices) == 1 else np.concatenate([ring[s] for s in slices])


def _slices(start: int, stop: int) -> list[slice]:
    """Return where in the ring the rows start…stop are: one slice, or two if they wrap."""
    first, last = start % RING_ROWS, (stop - 1) % RING_ROWS
    if first <= last:
        return [slice(first, last + 1)]
    return [slice(first, RING_ROWS), slice(0, last + 1)]
