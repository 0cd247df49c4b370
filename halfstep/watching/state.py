"""State that the parts of a watched loop share. This module imports torch."""

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.evidence.best_effort import BestEffort
from halfstep.evidence.collector import Collector
from halfstep.recording.gradients import Gradients, Measured
from halfstep.telemetry.events import Event
from halfstep.watching.backward_passes import BackwardPasses
from halfstep.watching.current_step import ClipOfStep, CurrentStep
from halfstep.watching.diagnoses import Diagnoses, Intervals
from halfstep.watching.first_clips import FirstClips


class LoopState:
    """State of a loop: its optimizers and scalers, and the current step."""

    def __init__(
        self,
        on_event: Callable[[Event], None],
        say: Callable[[str], None],
        optimizers: Mapping[str, Optimizer] | None,
        step: int,
        every: Intervals,
    ) -> None:
        """optimizers: the only ones to observe, None for all.  step: the last completed one."""
        self.closed_steps = step
        self.norms_every = every.norms  # steps between norms of all gradients, 0 for never
        #: Names of the optimizers to observe, by their ids; None: all are.
        self.wanted = None if optimizers is None else {id(o): n for n, o in optimizers.items()}
        self.ignored: set[int] = set()  # ids of optimizers inside a framework's own
        self.modules: tuple[nn.Module, ...] = ()  # that name the parameters
        self.names: dict[nn.Parameter, str] = {}
        self.known: dict[int, Gradients] = {}  # by id of the optimizer, which they keep alive
        self.row_of: dict[int, CurrentStep] = {}  # of the scaler that steps an optimizer, by its id
        self.open_rows: dict[int, CurrentStep] = {}  # by a scaler's id
        self.unscaled = CurrentStep()  # the row of steps without a scaler
        self.current = self.unscaled  # the row of the scaler that was called last
        self.scalers = 0  # number of scalers that have updated
        #: On the device, once that is known.
        self.one: Tensor = torch.ones((), dtype=torch.float32, device="cpu")
        self.step_started: float | None = None
        self.ended: float | None = None  # end of the last step in the open row without a scaler
        self.is_settled = optimizers is not None  # all optimizers of an iteration are known
        self.before_clip: dict[int, Measured] = {}  # gradients as measured before a clip
        #: Clips of gradients that are measured at their optimizer's step, by its id and theirs.
        self.clips_ahead: dict[int, dict[int, ClipOfStep]] = {}
        self.clipping: set[int] = set()  # optimizers whose last unscaled step was then clipped
        self.has_pending = False  # unscaled gradients wait for their clip
        #: Norms of gradients to which a pass has added, by the id of an optimizer that has not
        #: stepped since: they may still be cleared.
        self.uncleared: dict[int, Tensor] = {}
        self.first_clips = FirstClips()
        #: By row, if some optimizers had no gradients: which ones had.
        self.taking_part: dict[int, list[bool]] = {}
        self.passes = BackwardPasses(lambda: self.names)
        self.best_effort = BestEffort(on_event, say, lambda: self.step)
        self.evidence = Collector(on_event, say, partial(self.best_effort.lose, "shadow steps"))
        wants_more = every.histogram or every.headroom
        self.diagnoses = Diagnoses(every, on_event, say) if wants_more else None

    @property
    def step(self) -> int:
        """The last step; without a scaler, the iteration under way once it has stepped."""
        return self.closed_steps + bool(self.unscaled.stepped)

    def start(self) -> None:
        """Start the step's time, unless it runs."""
        if self.step_started is None:
            self.step_started = time.perf_counter()

    def is_wanted(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is to be observed."""
        identity = id(optimizer)
        return (self.wanted is None or identity in self.wanted) and identity not in self.ignored
