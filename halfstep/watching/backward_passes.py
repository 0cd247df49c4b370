"""Assignment of backward passes to the optimizer steps that use them.

The losses of a step are those of the backward passes that changed the optimizer's gradients since
they were last cleared. A change is detected by the version counters of two of its parameters'
gradients, before and after a pass; nothing on the device is read. If the weights changed between
two passes without a step (LBFGS's closures, SAM's ascent), the first pass has the loss. This module
imports torch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import ref

from torch import Tensor
from torch._C import _current_graph_task_id
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

#: A gradient's identity and version counters; None without a gradient.
Mark: TypeAlias = tuple[int, int, int] | None
MOST_KEPT = 1_000  # losses and scaled tensors of a loop without steps
MOST_EARLY = 64  # passes of the first iteration
SEQUENCES = (tuple, list)
#: Steps in a row with gradients of the step before, at which their values are looked at, and
#: gradients in a row that the loop has cleared without a step, at which it is reported.
MILESTONES = frozenset(2**power for power in range(3, 31))
PLAIN_AFTER = 100  # passes; evidence examines each of these, of a device
PLAIN_AFTER_ON_HOST = 16
NOTHING = (None, None, None)
NO_PASS = -1  # torch's id of the running pass, outside any
INPUTS = 3  # index of the inputs among the engine's arguments after the roots
#: What a loss that is scaled by hand comes from, or one that is weighted by scaled gradients.
PRODUCTS = frozenset(f"{name}Backward" for name in ("Mul", "Div", "Dot", "Mv", "Mm", "Bmm"))
#: What a scaled loss or gradient does not pass through: losses, and the last layers of models.
UNSCALABLE = frozenset(
    f"{name}Backward"
    for name in (
        *("NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "MseLoss"),
        *("SmoothL1Loss", "HuberLoss", "CtcLoss", "LogSoftmax", "Softmax", "Logsumexp", "Softplus"),
        *("LogSigmoid", "Sigmoid", "Tanh", "Log", "Exp", "Pow", "Addmm", "Convolution"),
    )
)
#: What divides a loss by the number of its accumulated passes: loss / 4, or loss * 0.25.
DIVISIONS = ("DivBackward0", "MulBackward0")
DIVISOR_ERROR = 1e-4
MOST_NODES = 32  # read of a root's graph
COPIED_ROWS = 16  # the first ones, which show whether the loop changes its losses in place


def mark(parameter: Tensor) -> Mark:
    """Return the mark of a parameter, which differs after each change of its gradient."""
    return marks((parameter,))[0]


def marks(parameters: Sequence[Tensor]) -> list[Mark]:
    """Return the marks of several parameters."""
    result: list[Mark] = []
    for parameter in parameters:  # inlined: each function call adds to every step
        gradient = parameter.grad
        if gradient is None:
            result.append(None)
        elif type(gradient) is Tensor:
            result.append((id(gradient), gradient._version, 0))
        else:
            # Accumulation changes only the version of a DTensor's local tensor, `zero_` only its
            # own.
            local = getattr(gradient, "_local_tensor", gradient)
            result.append((id(gradient), gradient._version, local._version))
    return result


class BackwardPass:
    """A pass under way or done. losses: of its roots; None if any is unknown."""

    __slots__ = ("changed", "is_scaled", "is_unscaled", "losses", "weights")

    def __init__(
        self, losses: list[Tensor] | None, *, is_scaled: bool, is_unscaled: bool = False
    ) -> None:
        """is_scaled, is_unscaled: neither is true if it is unknown."""
        self.losses, self.is_scaled, self.is_unscaled = losses, is_scaled, is_unscaled
        #: Ids of named parameters in the first iteration: those whose gradients it changed, and the
        #: weights' versions before it.
        self.changed: set[int] = set()
        self.weights: dict[int, int] = {}


class OwnLosses:
    """The losses of one optimizer's next step."""

    __slots__ = (
        "_before",
        "_mark",
        "_was_none",
        "carried",
        "has_changed",
        "is_carried",
        "is_dropped",
        "is_first",
        "is_scaled",
        "losses",
        "of_grad",
        "probes",
        "took",
        "unscaled",
        "weights",
    )

    def __init__(self, optimizer: Optimizer) -> None:
        self.losses: list[Tensor] = []
        self.of_grad: list[Tensor] = []  # from autograd.grad over its parameters
        self.has_changed = False  # a pass has changed its gradients at least once
        self.took: BackwardPass | None = None  # the pass in which it stepped
        self.is_first = True  # no pass has changed its gradients since its step
        self.is_scaled = False  # a pass that changed its gradients began from a scaled loss
        self.unscaled = 0  # passes over its gradients that began from a loss without the scale
        self.is_carried = False  # the gradients of the last step were not cleared since
        self.carried = 0  # steps in a row that were made with such gradients
        self.is_dropped = False  # those of a scaled loss before were cleared without a step
        self.weights: int | None = None  # their version at the first pass
        self._was_none = False  # the first gradient was None before the first pass
        self._before: list[Mark] = []
        self._mark: list[Mark] | None = None
        self.probes: list[Tensor] = []
        self.choose(optimizer)

    def choose(self, optimizer: Optimizer) -> None:
        """Choose the probed parameters: the first and the last one that has a gradient."""
        able = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if isinstance(p, Tensor) and p.requires_grad
        ]
        having = [p for p in able if p.grad is not None] or able
        self.probes = [having[0], having[-1]] if len(having) > 1 else having

    def begins(self) -> bool:
        """Record the gradients' marks before a pass; return whether it re-evaluates a loss.

        It does if the weights changed since the last pass without a step.
        """
        if not self.probes:
            return False
        weights = self.probes[0]._version
        self._before = now = marks(self.probes)
        if self._mark is None:
            self.weights, self._was_none = weights, now[0] is None
            return False
        is_cleared = not (any(now) and _overlap(now, self._mark))
        self.is_dropped = (
            is_cleared and self.is_scaled and not self.is_first and weights == self.weights
        )
        if is_cleared:
            self.is_scaled, self.unscaled = False, 0
        if is_cleared or self.is_first:
            self._was_none = now[0] is None
        if not self.is_first and weights != self.weights:
            return True
        self.weights = weights
        if is_cleared:
            self.losses, self.is_first, self.is_carried = [], True, False
        elif self.is_first and now == self._mark:
            self.is_carried = True
        return False

    def ends(self, done: BackwardPass, *, is_again: bool) -> bool:
        """Record the losses of a pass; return whether it changed the gradients.

        is_again: the pass re-evaluates a loss.
        """
        now = marks(self.probes)
        if now == self._before or self.took is done:
            self.has_changed |= self.took is done
            self.took = None
            return False
        self.has_changed = True
        self._mark = now
        if not is_again:
            self.is_first = False
            self.losses += done.losses or ()
        self.is_scaled |= done.is_scaled
        self.unscaled += done.is_unscaled
        return True

    def begins_at(self, versions: Mapping[int, int]) -> None:
        """Set the weights' version at the first pass. versions: by the parameters' ids."""
        if self.probes:
            self.weights = versions.get(id(self.probes[0]), self.weights)

    def is_plain(self, passes: int) -> bool:
        """Return whether the next step's losses are those of all passes, over cleared gradients."""
        return self._was_none and len(self.losses) == passes and not self.of_grad

    def has_moved(self) -> bool:
        """Return whether the weights changed since the first pass of this step."""
        if not self.probes or self.weights is None:
            return False
        return self.probes[0]._version != self.weights

    def remark(self) -> None:
        """Treat gradients that a clip changed in place as unchanged."""
        if self._mark is not None:
            self._mark = marks(self.probes)

    def resumes(self, losses: list[Tensor], *, is_scaled: bool) -> None:
        """Continue after passes that were not examined. losses: of those since the step."""
        self._mark = marks(self.probes)
        if losses:
            self.losses, self.is_first, self.is_scaled = losses, False, is_scaled

    def is_uncleared(self) -> bool:
        """Return whether the first gradient is untouched since the last pass or clip."""
        return bool(
            self._mark and self._mark[0] is not None and mark(self.probes[0]) == self._mark[0]
        )

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether a probed parameter is among the inputs."""
        return any(value is probe for probe in self.probes for value in inputs)

    def take(self, optimizer: Optimizer, under_way: BackwardPass | None) -> list[Tensor]:
        """Return the losses of the current step, and reset for the next one."""
        losses = self.losses
        if under_way is not None:
            losses, self.took = losses + list(under_way.losses or ()), under_way
        elif not losses:
            losses = self.of_grad
        if self.probes and self.probes[0].grad is None:
            self.choose(optimizer)
        self.carried = self.carried + 1 if self.is_carried else 0
        self.is_carried = False
        self.losses, self.of_grad, self.is_first, self.is_scaled = [], [], True, False
        self.unscaled = 0
        return losses


class BackwardPasses:
    """All backward passes of a loop, as reported by the wrapped engine."""

    def __init__(self, named: Callable[[], Iterable[Tensor]]) -> None:
        """named: returns the named parameters, for the first iteration."""
        self._named = named
        self._own: dict[int, OwnLosses] = {}  # by an optimizer's id
        self._stack: list[BackwardPass | None] = []  # None: nested, or not of a loss
        self._again: set[int] = set()  # optimizers whose loss the pass under way re-evaluates
        #: By a scaled tensor's id: it, its loss, and the tensor that was given to scale.
        self._scaled: dict[int, tuple[Any, Tensor | None, Any]] = {}
        self._is_scaled = False  # a tensor was scaled from which no pass has started yet
        self._is_pass_scaled = False  # the pass under way starts from a scaled loss
        self._is_pass_unscaled = False  # it starts from a loss that was not multiplied by the scale
        self._used: set[int] = set()  # ids of scaled tensors that passes have started from
        self._has_scaled = False  # a tensor was ever scaled, as far as calls are seen
        self.is_over = False  # a row has closed: the next call starts a new iteration
        self._recent: list[Tensor] = []  # losses since the last step of any optimizer
        self._early: list[BackwardPass] | None = []  # of the first iteration
        self._early_marks: dict[int, Mark] = {}
        self.changed: list[int] = []  # optimizers whose gradients the last pass changed
        self.count = 0  # passes that accumulate gradients
        self.since_step = 0  # of them since an optimizer's last step
        self.dropped = 0  # times since then that scaled gradients were cleared without a step
        self.is_dropped = False  # that is so of those before the pass under way
        #: By an optimizer: a scaler that was updated before its step, and the scale before that.
        self.first_scales: dict[int, tuple[GradScaler, Tensor]] = {}
        self.suspected: set[int] = set()  # optimizers whose gradients seem to be never cleared
        #: The only optimizer's, while each step has one plain pass (see `repeats`).
        self.plain: OwnLosses | None = None
        self._plain_losses: list[Tensor] = []  # of the passes since the step, if those were plain
        #: Losses by reference since the last row, their versions, and in host memory their numbers:
        #: what changes a tensor's `.data` leaves its version.
        self.references: list[tuple[Tensor, int, Any]] = []
        self.copies_until = COPIED_ROWS  # rows until which losses are copied; -1: for ever
        self.rows = 0
        self.is_settled = False  # losses are references, and the first ones did not change
        #: What the loop has divided the losses of the passes since the step by, 1 if unknown.
        self.divisor = 1.0
        self._accumulation = 1.0  # the divisor of a step that had as many passes

    @property
    def is_under_way(self) -> bool:
        """Whether a pass is running."""
        return bool(self._stack)

    @property
    def is_scaled(self) -> bool:
        """Whether this iteration's gradients come from scaled losses."""
        return bool(self._scaled) or self._is_scaled

    @property
    def latest_loss(self) -> Tensor | None:
        """The loss of the latest pass since any optimizer's last step, if known."""
        if self._plain_losses:
            return self._plain_losses[-1]
        return self._recent[-1] if self._recent else None

    def capture(self, loss: Tensor) -> Tensor | None:
        """Return a loss without its graph, by reference; None if it is not a single number.

        The first ones are copied, and all of them where a loop changes a loss in place.
        """
        try:
            if type(loss) is not Tensor or loss.ndim or is_functorch_wrapped_tensor(loss):
                return _copy_of_rare(loss)
            if not loss.is_floating_point():
                return None
            if self.since_step or self._accumulation > 1:
                divisor = _divisor(loss)
                is_first = self.since_step == (self._accumulation == 1)
                self.divisor = divisor if is_first or divisor == self.divisor else 1.0
            value = loss.detach()
            if self.copies_until < 0:
                return value.clone()
            number = value.tolist() if value.is_cpu else None
            self.references.append((value, value._version, number))
            return value if self.rows >= self.copies_until else value.clone()
        except Exception:  # a subclass without these methods
            return None

    def accumulation(self, losses: int) -> float:
        """Return what a step's losses were divided by to accumulate gradients, else 1.

        losses: their number.  A last step of fewer passes is divided as those before.
        """
        if losses > 1 and self.divisor == losses:
            self._accumulation = self.divisor
        return self.divisor if self.divisor == self._accumulation else 1.0

    def get_losses(self, losses: Sequence[Tensor]) -> Sequence[float | Tensor]:
        """Return the losses of a row that is about to be written, as they were; none if unknown."""
        is_copied = self.rows < self.copies_until
        changed: dict[int, Any] = {}
        for value, version, number in self.references:
            now = value._version if number is None else value.tolist()
            before = version if number is None else number
            if now != before and not (now != now and before != before):  # NaN differs from itself
                changed[id(value)] = number
        self.references.clear()
        self.rows += 1
        self.is_settled = 0 <= self.copies_until <= self.rows
        if not changed:
            return losses
        self.copies_until, self.is_settled = -1, False
        if is_copied:
            return losses
        if None in changed.values():
            return []
        return [changed.get(id(loss), loss) for loss in losses]

    def record_scaling(self, result: Any, outputs: Any) -> None:
        """Remember the loss of each tensor that a scaler returned.

        Only lists and tuples are traversed: other iterables may only be consumed by the loop.
        """
        if self.is_over and self._early is None:  # as _begin_iteration does
            self.is_over = self._is_scaled = False
            self._scaled.clear()
            self._used.clear()
        elif self.is_over or len(self._scaled) > MOST_KEPT:
            self._begin_iteration()
        if isinstance(result, Tensor):
            if isinstance(outputs, Tensor) and outputs.requires_grad:  # some scale a constant 1
                self._scaled[id(result)] = ref(result), self.capture(outputs), ref(outputs)
                if self._used:
                    self._used.discard(id(result))  # of a tensor that is gone
                self._is_scaled = self._has_scaled = True
        elif isinstance(result, list | tuple) and isinstance(outputs, list | tuple):
            for tensor, of in zip(result, outputs, strict=True):
                self.record_scaling(tensor, of)
        else:
            self._is_scaled = True

    def repeats(self, roots: Any) -> bool:
        """Record a pass like all recent ones, without `ends`; return False for any other.

        The first since the step is over gradients that were cleared to None, and further ones, of
        an accumulation, add to them. Each is from one loss, scaled if any is. It spares the usual
        loop most of the cost of a pass.
        """
        try:
            own = self.plain
            if self.count + 1 == PLAIN_AFTER:  # its graph is read
                return False
            losses = self._plain_losses
            if own is None or self.since_step != len(losses) or len(losses) == MOST_KEPT:
                return False
            if type(roots) is not tuple or len(roots) != 1:
                return False
            [root] = roots
            if self._has_scaled:
                scaled, loss, _ = self._scaled.get(id(root), NOTHING)
                if scaled is None or scaled() is not root:
                    return False
                self._used.add(id(root))
            elif self._stack or _current_graph_task_id() != NO_PASS or root.numel() != 1:
                return False
            else:
                loss = self.capture(root)
            if loss is None:
                return False
            probe = own.probes[0]
            weights, number = probe._version, loss.tolist() if loss.is_cpu else 0.0
            if not losses:
                is_usual = probe.grad is None
            else:  # it adds to the gradients of those before
                is_usual = probe.grad is not None and weights == own.weights
            if not is_usual or not math.isfinite(number):  # type: ignore[arg-type]
                return False
            own.weights = weights
            losses.append(loss)
            self.count += 1
            self.since_step += 1
            self._is_scaled = False
            return True
        except Exception:  # `begins` meets it too, and it is reported there
            return False

    def _examine(self) -> None:
        """Examine passes again, from the state that the plain ones have left."""
        if self.plain is not None:
            losses, self._plain_losses = self._plain_losses, []
            if losses:
                self._recent = list(losses)
            self.plain.resumes(losses, is_scaled=self._has_scaled)
            self.plain = None

    def begins(
        self, roots: Any, arguments: Sequence[Any], accumulates: bool, scale: Tensor | None
    ) -> list[Tensor] | None:
        """Record a pass before it runs; return its losses. scale: factor of the roots."""
        self._examine()
        is_nested = self._stack or _current_graph_task_id() != NO_PASS
        if is_nested or not isinstance(roots, SEQUENCES):
            self._stack.append(None)
            return None
        if self.is_over and not self._is_scaled:
            self._begin_iteration()
        losses = self._losses(roots, scale)
        if not accumulates:
            self._stack.append(None)
            self.count += self._note_grad(losses, arguments)
            return losses
        self.count += 1
        self.since_step += 1
        self._stack.append(
            BackwardPass(losses, is_scaled=self._is_pass_scaled, is_unscaled=self._is_pass_unscaled)
        )
        if self._again:
            self._again = set()
        self.is_dropped = False
        for identity, own in self._own.items():  # a comprehension costs a call
            if own.begins():
                self._again.add(identity)
            if own.is_dropped:
                self.is_dropped = True
                self.first_scales.pop(identity, None)
        self.dropped += self.is_dropped
        if self._early is not None:
            self._note_early()
        return losses

    def ends(self) -> None:
        """Record the end of the innermost pass."""
        done = self._stack.pop() if self._stack else None
        if done is None:
            return
        self._recent += done.losses or ()
        if len(self._recent) > MOST_KEPT:
            self._recent = self._recent[-1:]
        self.changed = changed = []
        for identity, own in self._own.items():
            if own.ends(done, is_again=identity in self._again):
                changed.append(identity)
        if self._early is not None:
            marks = {id(p): mark(p) for p in self._named()}
            done.changed = {key for key, now in marks.items() if now != self._early_marks.get(key)}
            self._early_marks = marks
            self._early.append(done)
            if len(self._early) > MOST_EARLY:
                self._early, self._early_marks = None, {}

    def take(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the losses of an optimizer's step; empty if unknown."""
        passes, self.since_step = self.since_step, 0
        own = self._own.get(id(optimizer))
        if self._plain_losses and own is self.plain:
            losses, self._plain_losses = self._plain_losses, []
            return losses
        self._examine()
        self.dropped = 0
        under_way = self._stack[0] if self._stack else None
        if own is not None:
            is_single = passes > 0 and len(self._own) == 1 and under_way is None
            is_usual = own.is_scaled or not self._has_scaled
            if is_single and is_usual and own.is_plain(passes):
                after = PLAIN_AFTER_ON_HOST if own.losses[0].is_cpu else PLAIN_AFTER
                self.plain = own if self.count > after else None
            losses = own.take(optimizer, under_way)
            if own.carried in MILESTONES:
                self.suspected.add(id(optimizer))
        else:
            own = self._own[id(optimizer)] = OwnLosses(optimizer)
            losses = self._early_losses(optimizer, own)
            own.has_changed = bool(losses)
            if under_way is not None:
                losses, own.took = list(under_way.losses or ()), under_way
        if not losses and len(self._own) == 1:
            losses = self._recent
        self._recent = []
        return losses

    def updating(self, scaler: GradScaler, scale: Tensor) -> None:
        """Keep the scale that an update may change, for gradients that no step has used yet."""
        self._examine()
        for identity, own in self._own.items():
            if not own.is_first and own.is_scaled and identity not in self.first_scales:
                self.first_scales[identity] = scaler, scale.clone()

    def has_changed(self, optimizer: int) -> bool:
        """Return whether a pass has ever changed an optimizer's gradients. optimizer: its id."""
        own = self._own.get(optimizer)
        return own is not None and own.has_changed

    def holds_scaled(self, optimizer: int) -> bool:
        """Return whether an optimizer's gradients are unchanged since a scaled loss's pass."""
        self._examine()
        own = self._own.get(optimizer)
        return own is not None and own.is_scaled and own.is_uncleared()

    def has_unscaled(self, optimizer: int) -> bool:
        """Return whether its gradients hold some of a loss that was not multiplied by the scale."""
        own = self._own.get(optimizer)
        return own is not None and own.unscaled > 0 and own.is_uncleared()

    def has_moved(self, optimizer: int) -> bool:
        """Return whether an optimizer's weights changed since its last backward pass."""
        own = self._own.get(optimizer)
        return own is not None and own.has_moved()

    def on_clip(self) -> None:
        """Treat gradients that a clip changed in place as unchanged."""
        for own in self._own.values():
            own.remark()
        if self._early is not None:
            self._early_marks = {id(p): mark(p) for p in self._named()}

    def count_carried(self, optimizer: int) -> int:
        """Return the number of latest steps whose gradients include those of the step before."""
        own = self._own.get(optimizer)
        return 0 if own is None else own.carried

    def list_uncleared(self) -> list[int]:
        """Return the ids of optimizers whose gradients were not cleared since the last pass."""
        self._examine()
        return [identity for identity, own in self._own.items() if own.is_uncleared()]

    def _begin_iteration(self) -> None:
        if not self.is_over:  # a loop without steps has scaled many losses
            self.references.clear()
        elif self._early is not None and self._own:
            self._early, self._early_marks = None, {}
        self.is_over = self._is_scaled = False
        self._scaled.clear()
        self._used.clear()

    def forget(self, optimizer: int) -> None:
        """Choose the probed parameters again, for an optimizer whose groups changed."""
        self._examine()
        self._own.pop(optimizer, None)

    def end_first_iteration(self) -> None:
        """Forget the passes of the first iteration: an optimizer of it is gone."""
        self._early, self._early_marks = None, {}

    def _losses(self, roots: Sequence[Any], scale: Tensor | None) -> list[Tensor] | None:
        losses: list[Tensor] = []
        self._is_pass_scaled = self._is_pass_unscaled = False
        for root in roots:
            if (scaled := self._scaled.get(id(root))) and scaled[0]() is root:
                loss = scaled[1]
                self._is_pass_scaled = True
                self._used.add(id(root))
            elif not isinstance(root, Tensor) or root.numel() != 1:
                return None
            else:
                loss = self.capture(root)
                if self._is_unscaled(root):
                    self._is_pass_unscaled = True
                elif self._is_scaled and scale is not None and loss is not None:
                    self._is_pass_scaled = True
                    loss = loss / scale.to(loss.device, non_blocking=True)
            if loss is None:
                return None
            losses.append(loss)
        self._is_scaled = False
        return losses

    def _is_unscaled(self, root: Tensor) -> bool:
        """Return whether a root is certainly not multiplied by the scale.

        It is one that was given to `scale` itself, or all that `scale` returned were roots
        already. A product may be scaled by hand, or by gradients of a scaled loss.
        """
        if any(given() is root for _, _, given in self._scaled.values()):
            return True
        is_other = self._has_scaled and self._scaled.keys() <= self._used
        return is_other and not _may_be_product(root)

    def _note_grad(self, losses: list[Tensor] | None, arguments: Sequence[Any]) -> bool:
        """Record a pass of autograd.grad; return whether it is over known parameters."""
        inputs = arguments[INPUTS] if len(arguments) > INPUTS else ()
        if not losses or not isinstance(inputs, tuple | list):
            return False
        is_known = False
        if self._early is not None:
            named = {id(p) for p in self._named()}
            if is_known := any(id(tensor) in named for tensor in inputs):
                self._recent += losses
        for own in self._own.values():
            if own.holds(inputs):
                is_known = True
                own.of_grad = own.of_grad + losses
        return is_known

    def _note_early(self) -> None:
        """Drop parameters whose gradients were cleared since from earlier passes."""
        marks = {id(p): mark(p) for p in self._named()}
        cleared = {key for key, now in marks.items() if now != self._early_marks.get(key)}
        versions = {id(p): p._version for p in self._named()}
        for earlier in self._early or ():
            # If the weights changed as well, the starting pass re-evaluates its loss.
            earlier.changed -= {key for key in cleared if earlier.weights.get(key) == versions[key]}
        self._early_marks = marks
        under_way = self._stack[-1]
        if under_way is not None:
            under_way.weights = versions

    def _early_losses(self, optimizer: Optimizer, known: OwnLosses) -> list[Tensor]:
        """Return the losses of an optimizer's first step, from passes before it was known."""
        if not self._early or not self._early_marks:
            return self._recent
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not own & self._early_marks.keys():
            return self._recent
        passes = [earlier for earlier in self._early if own & earlier.changed]
        if not passes:
            return []
        key = min(own & passes[0].weights.keys())
        known.begins_at(passes[0].weights)
        same = [earlier for earlier in passes if earlier.weights.get(key) == passes[0].weights[key]]
        return [loss for earlier in same for loss in earlier.losses or ()]


def _copy_of_rare(loss: Tensor) -> Tensor | None:
    """Return a copy of a loss of a subclass, or the mean of several numbers."""
    is_traced = type(loss).__module__.startswith("torch._subclasses")  # by the compiler
    if is_traced or (type(loss) is Tensor and is_functorch_wrapped_tensor(loss)):
        return None
    placements = getattr(loss, "placements", None)
    if placements is not None:  # only a replicated DTensor has the whole value in every process
        if not all(placement.is_replicate() for placement in placements):
            return None
        loss = loss.to_local()  # type: ignore[attr-defined]
    if loss.is_complex():
        return None
    loss = loss.detach().float()
    return loss.mean() if loss.ndim else loss + 0.0


def _divisor(loss: Tensor) -> float:
    """Return the number that a loss was divided by last, 1 if by none.

    A sum that is divided is a mean, not an accumulation.
    """
    node: Any = loss.grad_fn
    name = "" if node is None else node.name()
    if node is None or name not in DIVISIONS:
        return 1.0
    try:
        saved: Any = node._raw_saved_other
        other = saved.data if saved.unpack_hook is None else None  # a hook is the loop's own
    except (AttributeError, RuntimeError):  # an older torch, or a graph that is gone
        return 1.0
    if not isinstance(other, Tensor) or other.ndim or not other.is_cpu:
        return 1.0
    before = next((function for function, _ in node.next_functions if function is not None), None)
    number = float(other)
    if before is None or before.name().startswith("SumBackward") or not number:
        return 1.0
    divisor = number if name == DIVISIONS[0] else 1 / number
    return round(divisor) if abs(divisor - round(divisor)) < DIVISOR_ERROR else 1.0


def _may_be_product(root: Tensor) -> bool:
    """Return whether a root is made of a product, as far as its last operations tell."""
    nodes: list[Any] = [root.grad_fn]
    for _ in range(MOST_NODES):
        if not nodes:
            return False
        node = nodes.pop()
        name = "" if node is None else node.name().rstrip("0123456789")
        if name in PRODUCTS or isinstance(node, BackwardCFunction):
            return True
        if name and name not in UNSCALABLE:
            nodes += [function for function, _ in node.next_functions]
    return True


def _overlap(now: list[Mark], then: list[Mark]) -> bool:
    return any(map(_is_same, now, then))


def _is_same(now: Mark, then: Mark) -> bool:
    return now is not None and now == then
