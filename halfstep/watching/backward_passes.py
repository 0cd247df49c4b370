"""Assignment of backward passes to the optimizer steps that use them.

The losses of a step are those of the backward passes that changed the optimizer's gradients since
they were last cleared. A change is detected by the version counters of two of its parameters'
gradients, before and after a pass; nothing on the device is read. If the weights changed between
two passes without a step (LBFGS's closures, SAM's ascent), the first pass has the loss. This module
imports torch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from torch._C import _current_graph_task_id
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from halfstep.watching.first_iteration import FirstIteration
from halfstep.watching.kept_losses import KeptLosses
from halfstep.watching.own_losses import BackwardPass, OwnLosses

MOST_KEPT = 1_000  # losses and scaled tensors of a loop without steps
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
MOST_NODES = 32  # read of a root's graph


class BackwardPasses:
    """All backward passes of a loop, as reported by the wrapped engine."""

    def __init__(self, named: Callable[[], Iterable[Tensor]]) -> None:
        """named: returns the named parameters, for the first iteration."""
        self.own: dict[int, OwnLosses] = {}  # by an optimizer's id
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
        self.kept = KeptLosses()
        self.first = FirstIteration(named)

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

    def record_scaling(self, result: object, outputs: object) -> None:
        """Remember the loss of each tensor that a scaler returned.

        Only lists and tuples are traversed: other iterables may only be consumed by the loop.
        """
        if self.is_over and self.first.is_over:  # as _begin_iteration does
            self.is_over = self._is_scaled = False
            self._scaled.clear()
            self._used.clear()
        elif self.is_over or len(self._scaled) > MOST_KEPT:
            self._begin_iteration()
        if isinstance(result, Tensor):
            if isinstance(outputs, Tensor) and outputs.requires_grad:  # some scale a constant 1
                self._scaled[id(result)] = (
                    ref(result),
                    self.kept.capture(outputs, self.since_step),
                    ref(outputs),
                )
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
                loss = self.kept.capture(root, self.since_step)
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
        self, roots: object, arguments: Sequence[object], accumulates: bool, scale: Tensor | None
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
        for identity, own in self.own.items():  # a comprehension costs a call
            if own.begins():
                self._again.add(identity)
            if own.is_dropped:
                self.is_dropped = True
                self.first_scales.pop(identity, None)
        self.dropped += self.is_dropped
        if not self.first.is_over:
            self.first.begins(self._stack[-1])
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
        for identity, own in self.own.items():
            if own.ends(done, is_again=identity in self._again):
                changed.append(identity)
        if not self.first.is_over:
            self.first.ends(done)

    def take(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the losses of an optimizer's step; empty if unknown."""
        passes, self.since_step = self.since_step, 0
        own = self.own.get(id(optimizer))
        if self._plain_losses and own is self.plain:
            losses, self._plain_losses = self._plain_losses, []
            return losses
        self._examine()
        self.dropped = 0
        under_way = self._stack[0] if self._stack else None
        if own is not None:
            is_single = passes > 0 and len(self.own) == 1 and under_way is None
            is_usual = own.is_scaled or not self._has_scaled
            if is_single and is_usual and own.is_plain(passes):
                after = PLAIN_AFTER_ON_HOST if own.losses[0].is_cpu else PLAIN_AFTER
                self.plain = own if self.count > after else None
            losses = own.take(optimizer, under_way)
            if own.carried in MILESTONES:
                self.suspected.add(id(optimizer))
        else:
            own = self.own[id(optimizer)] = OwnLosses(optimizer)
            early = self.first.losses_of(optimizer, own)
            losses = self._recent if early is None else early
            own.has_changed = bool(losses)
            if under_way is not None:
                losses, own.took = list(under_way.losses or ()), under_way
        if not losses and len(self.own) == 1:
            losses = self._recent
        self._recent = []
        return losses

    def updating(self, scaler: GradScaler, scale: Tensor) -> None:
        """Keep the scale that an update may change, for gradients that no step has used yet."""
        self._examine()
        for identity, own in self.own.items():
            if not own.is_first and own.is_scaled and identity not in self.first_scales:
                self.first_scales[identity] = scaler, scale.clone()

    def holds_scaled(self, optimizer: int) -> bool:
        """Return whether an optimizer's gradients are unchanged since a scaled loss's pass."""
        self._examine()
        own = self.own.get(optimizer)
        return own is not None and own.is_scaled and own.is_uncleared()

    def on_clip(self) -> None:
        """Treat gradients that a clip changed in place as unchanged."""
        for own in self.own.values():
            own.remark()
        if not self.first.is_over:
            self.first.remark()

    def list_uncleared(self) -> list[int]:
        """Return the ids of optimizers whose gradients were not cleared since the last pass."""
        self._examine()
        return [identity for identity, own in self.own.items() if own.is_uncleared()]

    def _begin_iteration(self) -> None:
        if not self.is_over:  # a loop without steps has scaled many losses
            self.kept.references.clear()
        elif self.own:
            self.first.end()
        self.is_over = self._is_scaled = False
        self._scaled.clear()
        self._used.clear()

    def forget(self, optimizer: int) -> None:
        """Choose the probed parameters again, for an optimizer whose groups changed."""
        self._examine()
        self.own.pop(optimizer, None)

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
                loss = self.kept.capture(root, self.since_step)
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

    def _note_grad(self, losses: list[Tensor] | None, arguments: Sequence[object]) -> bool:
        """Record a pass of autograd.grad; return whether it is over known parameters."""
        inputs = arguments[INPUTS] if len(arguments) > INPUTS else ()
        if not losses or not isinstance(inputs, tuple | list):
            return False
        is_known = False
        if not self.first.is_over:
            named = {id(p) for p in self.first.named()}
            if is_known := any(id(tensor) in named for tensor in inputs):
                self._recent += losses
        for own in self.own.values():
            if own.holds(inputs):
                is_known = True
                own.of_grad = own.of_grad + losses
        return is_known


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
