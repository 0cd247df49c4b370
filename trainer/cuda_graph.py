"""Steps that are replayed from a CUDA graph: training.cuda_graph.

A graph queues all kernels of a step by one call, where the host would queue them one by one: a
step that is bound by the host takes as long as its kernels. Captured is the work from the forward
pass to the update of the weights. The row of telemetry and the update of the scale are queued after
it, as in every step.

The first steps run without the graph, and so do steps that an observer reads from the inside, such
as those of a histogram, and batches of other shapes. They compute the same bits, as long as
`training_step` does the same in each step. What the host would have to do in each is found in the
step before the capture: waits for the device, random numbers and logged values of the host. Such a
recipe, and one that cannot be captured, runs without a graph, and an event says why.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from halfstep.recipe import Recipe, RecipeError
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, LeftOut
from trainer.distributed.ranks import Ranks
from trainer.logged_values import Logged
from trainer.observers import Observers
from trainer.optimizers import StepResult, WatchedOptimizer

if TYPE_CHECKING:
    from trainer.step import StepContext

NAME = "CUDA graph"
WARM_UP_STEPS = 3  # libraries start, and the scaler creates its tensors
WAIT = "called a synchronizing CUDA operation"
REASON_CHARACTERS = 500

Attempt = Callable[["StepContext", Iterable[object]], StepResult]


def find_obstacle(recipe: Recipe, config: RunConfig, device: torch.device, ranks: Ranks) -> str:
    """Return why steps of this configuration cannot be captured; "" if they can."""
    optimizers = recipe.optimizers.values()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    obstacles = {
        f"the device is {device.type}, not cuda": device.type != "cuda",
        "several devices train together": ranks.world_size > 1,
        "the precision is fp8": config.precision == "fp8",
        "training.compile is on": config.training.compile,
        "the recipe sets the learning rates": config.training.schedule == "recipe",
        "scaler.retry_in_fp32 waits for each step": config.scaler.retry_in_fp32,
        "the recipe has several optimizers": len(optimizers) > 1,
        "the optimizer is not fused": not all(group.get("fused") for group in groups),
        "a hook of the optimizer reads the gradients": any(
            optimizer._optimizer_step_pre_hooks for optimizer in optimizers
        ),
    }
    return next((text for text, stands in obstacles.items() if stands), "")


@dataclass(frozen=True)
class _Captured:
    """A graph of a step, with the tensors that it reads and writes."""

    graph: "torch.cuda.CUDAGraph"
    inputs: list[object]  # leaves of the micro-batches
    result: StepResult
    gradients: list[Tensor | None]  # of the optimizer's parameters
    scaler_state: dict[str, object]  # of the optimizer, which the scaler's update reads and drops
    logged: dict[str, list[Tensor]]


class GraphedSteps:
    """Attempts steps from a graph, once one is captured."""

    def __init__(self, logged: Logged, on_event: Callable[[Event], None]) -> None:
        self._logged, self._on_event = logged, on_event
        self._eager_left = WARM_UP_STEPS
        self._is_checked = self._is_impossible = False
        #: By whether gradient norms are taken.
        self._captured: dict[bool, _Captured] = {}

    def forget(self) -> None:
        """Drop the graphs: the optimizer has other tensors now."""
        self._captured.clear()

    def attempt(
        self, context: "StepContext", batches: Iterable[object], attempt: Attempt
    ) -> StepResult:
        """Attempt the step of the only optimizer, by `attempt` where there is no graph for it."""
        if self._is_impossible or context.observers.reads_inside():
            return attempt(context, batches)
        if self._eager_left:
            self._eager_left -= 1
            return attempt(context, batches)
        batches = list(batches)
        if not self._is_checked:
            return self._check(context, batches, attempt)
        [watched] = context.optimizers.values()
        captured = self._captured.get(watched.takes_norms)
        if captured is None:
            captured = self._capture(context, watched, batches, attempt)
        if captured is None or not _fits(captured.inputs, leaves := tree_flatten(batches)[0]):
            return attempt(context, batches)
        for static, leaf in zip(captured.inputs, leaves, strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf, non_blocking=True)
        context.observers.before_update()  # the weights are those of the step before
        captured.graph.replay()
        for parameter, gradient in zip(watched.parameters, captured.gradients, strict=True):
            parameter.grad = gradient  # which a step without the graph may have replaced
        _states(context.scaler)[id(watched.optimizer)] = captured.scaler_state
        self._logged.repeat(captured.logged)
        return captured.result

    def _check(self, context: "StepContext", batches: list[object], attempt: Attempt) -> StepResult:
        """Attempt a step without a graph, and find what the host has to do in it."""
        self._is_checked = True
        before = _host_generators()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = attempt(context, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if WAIT in str(warning.message)]
        if waits:
            self._give_up(context, f"{waits[0].filename}:{waits[0].lineno} waits for the device")
        elif _host_generators() != before:
            self._give_up(context, "training_step draws random numbers on the host")
        elif self._logged.has_host_values:
            self._give_up(context, "training_step logs values of the host")
        return result

    def _capture(
        self,
        context: "StepContext",
        watched: WatchedOptimizer,
        batches: list[object],
        attempt: Attempt,
    ) -> _Captured | None:
        """Capture a step, which does not run yet; return None if that is not possible."""
        static = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batches)
        unobserved = replace(
            context, observers=Observers(lambda _: None, lambda _: None), graph=None
        )
        graph, states = torch.cuda.CUDAGraph(), _states(context.scaler)
        try:
            # The loader's thread may allocate memory meanwhile.
            with (
                _capturable(watched.optimizer),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                result = attempt(unobserved, static)
        except RuntimeError as error:
            watched.drop_gradients()
            states.pop(id(watched.optimizer), None)
            self._give_up(context, " ".join(str(error).split()))
            _check_generator(error)
            return None
        inputs, state = tree_flatten(static)[0], states.get(id(watched.optimizer), {})
        gradients = [parameter.grad for parameter in watched.parameters]
        captured = _Captured(graph, inputs, result, gradients, state, self._logged.take())
        self._captured[watched.takes_norms] = captured
        return captured

    def _give_up(self, context: "StepContext", reason: str) -> None:
        self._is_impossible = True
        self._captured.clear()
        step, reason = context.observers.step, reason[:REASON_CHARACTERS]
        self._on_event(LeftOut(step=step, diagnosis=NAME, reason=reason))


@contextmanager
def _capturable(optimizer: Optimizer) -> Iterator[None]:
    """Let Adam be captured: it reads its groups' "capturable", which changes no fused update."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def _fits(static: list[object], leaves: list[object]) -> bool:
    """Return whether a graph of these inputs can take these: shapes, dtypes and other values."""

    def fits(one: object, other: object) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        with suppress(Exception):  # of a comparison of the recipe's own types
            return bool(one is other or one == other)
        return False

    return len(static) == len(leaves) and all(map(fits, static, leaves))


def _states(scaler: GradScaler) -> dict[int, dict[str, object]]:
    """Return what the scaler knows of optimizers until its update; nothing if it is disabled."""
    states: dict[int, dict[str, object]] = getattr(scaler, "_per_optimizer_states", {})
    return states


def _host_generators() -> tuple[object, ...]:
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), repr(numpy_state), torch.get_rng_state().numpy().tobytes()


def _check_generator(cause: RuntimeError) -> None:
    """Raise RecipeError if a failed capture has left the device's random generator unusable."""
    state = torch.cuda.get_rng_state()
    try:
        torch.rand(1, device="cuda")
    except RuntimeError:
        raise RecipeError(
            f"the capture of a CUDA graph failed, and dropout cannot go on after it: {cause}. Set "
            "training.cuda_graph to False"
        ) from cause
    torch.cuda.set_rng_state(state)
