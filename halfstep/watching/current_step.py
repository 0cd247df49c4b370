"""State of the step under way. This module imports torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.recording.gradients import Measured
from halfstep.watching.exponents import Exponents

#: A number, or a 0-dim tensor that the host reads once it has arrived.
Value: TypeAlias = float | Tensor

MOST_CLIPS = 16  # of a step


class ClipOfStep(NamedTuple):
    """A clip by the L2 norm of the gradients of some parameters."""

    ids: list[int]  # of the parameters
    parameters: Sequence[Tensor]
    max_norm: float


class CurrentStep:
    """Step state of one scaler, or of the optimizers that no scaler steps.

    Optimizers are keyed by id.
    """

    __slots__ = (
        "ascents",
        "clips",
        "counted",
        "direct",
        "divisors",
        "found_inf",
        "has_replaced",
        "is_by_hand",
        "is_continued",
        "is_special",
        "losses",
        "measured",
        "number",
        "of_step",
        "pending",
        "rate",
        "restored",
        "scaler",
        "stepped",
        "version",
    )

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self.scaler = scaler  # keeps it alive: its id is a key
        self.number: int | None = None  # scalers are numbered in the order of their first update
        self.ascents = 0  # consecutive updates of the scaler before the step that they belong to
        self.is_continued = False  # the scale changed since the last row, in an ascent
        self.has_replaced = False  # this scaler replaced another one of the same optimizer
        #: An optimizer whose state was loaded, and that of this new scaler was not.
        self.restored = ""
        self.is_special = False  # is_continued, has_replaced, restored, or `direct` is not empty
        #: Identity and version of the scale after the last update: unless it was set by hand.
        self.version: tuple[int, int] | None = None
        self.counted: list[tuple[Exponents, Tensor]] = []  # filled in steps with a histogram
        self.clips: dict[int, ClipOfStep] = {}  # by the clip's id: several optimizers may share it
        self.losses: dict[int, list[Tensor]] = {}  # by optimizer
        self.divisors: dict[int, float] = {}  # of the losses, by optimizer; 1 if there is none
        self.measured: dict[int, Measured] = {}
        self.pending: set[int] = set()  # unscaled optimizers whose norms the clip will compute
        self.stepped: set[int] = set()  # optimizers whose step the loop called
        self.direct: set[int] = set()  # optimizers that it stepped without their scaler
        self.found_inf: dict[int, Tensor] = {}
        self.rate: float | Tensor | None = None
        self.is_by_hand = False  # the loop moved the weights, and no optimizer stepped
        #: What is emptied for the next step.
        self.of_step: tuple[dict[int, Any] | set[int], ...] = (
            *(self.clips, self.losses, self.divisors, self.measured, self.found_inf),
            *(self.pending, self.stepped, self.direct),
        )
