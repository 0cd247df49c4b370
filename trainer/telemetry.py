"""What each step was like, measured on the device and brought to the host without a wait.

The loop writes one row a step into a ring on the device. Now and then the rows that are complete
are copied to pinned memory behind the work already queued; an event, polled at step boundaries,
says when they have arrived. The host never waits for the device, except before a checkpoint and
at the end, where it waits anyway. On a CPU the ring is host memory, and is read directly.

    row, fp32:  [loss, scale before, scale after, found_inf ×O, total norm ×O, norm ×P]
                O optimizers, P parameters in the order of the optimizers, then of the modules
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainer.recipe import RecipeError
from trainer.spool import (
    NONFINITE_LOSS,
    NORM_OVERFLOW,
    SKIPPED,
    STEP_DTYPE,
    Event,
    Steps,
    optimizer_skipped,
)

RING_ROWS = 256  # must exceed what is drained at once plus what may be in flight
DRAIN_ROWS = 64
DRAIN_SECONDS = 0.1
LOSS, SCALE, SCALE_AFTER, FOUND_INF = 0, 1, 2, 3  # columns; the others follow
CLIP_EPSILON = 1e-6  # added to the norm by clip_grads_with_norm_


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
        self._zero, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._found_inf = self._zero
        # The result of a step in which the recipe yields no loss for this optimizer.
        self.idle_result = (self._zero, self._zero, torch.zeros(len(self.names), device=device))
        optimizer.register_step_pre_hook(self._keep_found_inf)

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

    def _keep_found_inf(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        # Cloned, because scaler.update() adds other optimizers' flags to it in place.
        self._found_inf = self._zero if found_inf is None else found_inf.clone()


class Telemetry:
    """The ring, its way to the host, and what the host makes of it: records and scaler events."""

    def __init__(
        self,
        optimizers: Mapping[str, WatchedOptimizer],
        device: torch.device,
        max_grad_norm: float | None,
        on_steps: Callable[[Steps], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self._optimizers = optimizers
        self._max_grad_norm = max_grad_norm
        self._on_steps, self._on_event = on_steps, on_event
        self.skipped = 0  # steps in which any optimizer was skipped, as far as drained
        columns = FOUND_INF + sum(2 + len(each.names) for each in optimizers.values())
        self._one = torch.ones((), device=device)
        self._ring = torch.zeros(RING_ROWS, columns, device=device)
        # The slot to write is a device tensor, so that a CUDA graph could capture the write.
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        # What only the host knows: step, times, learning rate.
        self._records = np.zeros(RING_ROWS, STEP_DTYPE)
        self._written = self._sent = self._read = 0  # rows, ever: read ≤ sent ≤ written
        self._drained_at = time.monotonic()
        self._pinned: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._pinned = torch.empty(RING_ROWS, columns, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Hand over what is left. After an error the device may be lost: that error goes first."""
        with suppress(*([RuntimeError] if kind else [])):
            self.drain()

    def read_scale(self, scaler: GradScaler) -> Tensor:
        """Return the scale as a new 0-dimensional tensor, without a wait; 1 if disabled."""
        return scaler.scale(self._one)

    def write(
        self,
        loss: Tensor,
        scale_before: Tensor,
        scale_after: Tensor,
        found_inf: Sequence[Tensor],
        total_norms: Sequence[Tensor],
        norms: Sequence[Tensor],
    ) -> None:
        """Queue this step's row on the device: three kernels, and no wait."""
        scalars = torch.stack([loss, scale_before, scale_after, *found_inf, *total_norms])
        self._ring.index_copy_(0, self._slot, torch.cat([scalars, *norms]).unsqueeze(0))
        self._slot.add_(1).remainder_(RING_ROWS)

    def tick(self, step: int, elapsed_ms: int, step_us: int, lr: float) -> None:
        """Add what the host knows about the row just written, and drain what is due."""
        record = self._records[self._written % RING_ROWS]
        record["step"], record["elapsed_ms"] = step, elapsed_ms
        record["step_us"], record["lr"] = min(step_us, 2**31 - 1), lr
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
            self._hand_over(self._ring)
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
            self._hand_over(self._pinned)

    def _hand_over(self, host_ring: Tensor) -> None:
        if self._read == self._sent:
            return
        slices = _slices(self._read, self._sent)
        rows = np.concatenate([host_ring[s].numpy() for s in slices])  # a copy
        records = np.concatenate([self._records[s] for s in slices])
        self._read = self._sent
        events = self._interpret(rows, records)
        self.skipped += int(np.count_nonzero(records["flags"] & SKIPPED))
        self._on_steps(records)
        for event in events:
            self._on_event(event)

    def _interpret(self, rows: NDArray[np.float32], records: Steps) -> list[Event]:
        """Fill the records in from the rows, and say what the scaler did."""
        count = len(self._optimizers)
        found_inf = rows[:, FOUND_INF : FOUND_INF + count] != 0  # (steps, O)
        totals = rows[:, FOUND_INF + count : FOUND_INF + 2 * count]  # (steps, O)
        norms = rows[:, FOUND_INF + 2 * count :]  # (steps, P)
        with np.errstate(all="ignore"):  # inf × 0 is NaN here as it is on the device
            clipped = totals * self._clip_coefficient(totals)
            records["grad_norm"] = np.sqrt(np.square(totals, dtype=np.float64).sum(axis=1))
            records["grad_norm_clipped"] = np.sqrt(np.square(clipped, dtype=np.float64).sum(axis=1))
        records["loss"], records["scale"] = rows[:, LOSS], rows[:, SCALE]

        skipped, loss_finite = found_inf.any(axis=1), np.isfinite(rows[:, LOSS])
        records["flags"] = np.where(skipped, SKIPPED, 0) | np.where(loss_finite, 0, NONFINITE_LOSS)
        # Finite gradients above about 1.8e19 have an infinite L2 norm; that is no skip.
        overflow = (np.isinf(totals) & ~found_inf).any(axis=1)
        records["flags"] |= np.where(overflow, NORM_OVERFLOW, 0).astype(np.uint32)
        for index in range(count):
            flag = optimizer_skipped(index)
            records["flags"] |= np.where(found_inf[:, index], flag, 0).astype(np.uint32)

        changed = rows[:, SCALE] != rows[:, SCALE_AFTER]
        return [
            event
            for i in np.flatnonzero(skipped | changed)
            for event in self._scaler_events(records[i], rows[i], found_inf[i], norms[i])
        ]

    def _clip_coefficient(self, totals: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._max_grad_norm is None:
            return np.ones_like(totals)
        limit, epsilon = np.float32(self._max_grad_norm), np.float32(CLIP_EPSILON)
        coefficient: NDArray[np.float32] = np.minimum(limit / (totals + epsilon), np.float32(1))
        return coefficient

    def _scaler_events(
        self,
        record: np.void,
        row: NDArray[np.float32],
        found_inf: NDArray[np.bool_],
        norms: NDArray[np.float32],
    ) -> list[Event]:
        before, after = float(row[SCALE]), float(row[SCALE_AFTER])

        def event(kind: str, optimizer: str | None, culprits: list[str]) -> Event:
            return {
                "event": "scaler",
                "kind": kind,
                "step": int(record["step"]),
                "optimizer": optimizer,
                "scale_before": before,
                "scale_after": after,
                "culprits": [{"name": name} for name in culprits],
                "loss_nonfinite": bool(record["flags"] & NONFINITE_LOSS),
            }

        events, first = [], 0
        for (name, watched), was_skipped in zip(self._optimizers.items(), found_inf, strict=True):
            own = norms[first : first + len(watched.names)]
            first += len(watched.names)
            if was_skipped:
                finite = np.isfinite(own)
                culprits = [n for n, ok in zip(watched.names, finite, strict=True) if not ok]
                events.append(event("skip", name, culprits))
        if after != before:
            events.append(event("growth" if after > before else "backoff", None, []))
        return events


def watch(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, WatchedOptimizer]:
    """Watch each optimizer, its parameters named as "<module>.<parameter>" in forward order.

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


def _slices(start: int, stop: int) -> list[slice]:
    """Return where in the ring the rows start…stop are: one slice, or two if they wrap."""
    first, last = start % RING_ROWS, (stop - 1) % RING_ROWS
    if first <= last:
        return [slice(first, last + 1)]
    return [slice(first, RING_ROWS), slice(0, last + 1)]
