"""Measures mixes of precisions on several batches. This module imports torch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.precision_lab.comparison import LOW, SCALE_STEP, Comparison, Mix, UnsupportedModel
from halfstep.precision_lab.error_statistics import Errors
from halfstep.precision_lab.module_patterns import ModuleTree
from halfstep.precision_lab.module_survey import Survey, Work, forward_ms, step_ms
from halfstep.precision_lab.plan_result import PlanPoint
from halfstep.precision_lab.suggestions import LOSS

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Modules with a precision of their own, float32 or bfloat16, with all that is in them.
State = Mapping[str, torch.dtype]


class Bounds(NamedTuple):
    """Bounds on the gradient of a mix."""

    max_error: float
    min_cosine: float

    def admit(self, errors: Errors) -> bool:
        """Return whether errors are within the bounds."""
        return errors.error <= self.max_error and errors.cosine >= self.min_cosine


class Situation:
    """A batch, and the weights with which it is measured."""

    def __init__(
        self, comparison: Comparison, load: Callable[[], None] | None = None, weights: str = ""
    ) -> None:
        """load: loads the weights into the models; None: they have them.  weights: their name."""
        self._comparison, self._load, self.weights = comparison, load, weights
        with self.ready():
            self.references = comparison.reference_gradients()
        if not self.references:
            raise UnsupportedModel("no parameter of the model has a gradient")

    @contextmanager
    def ready(self) -> Iterator[Comparison]:
        """Yield the comparison, ready for passes that change nothing."""
        if self._load is not None:
            self._load()
        with self._comparison.preserve():
            yield self._comparison


class Candidate(NamedTuple):
    """A mix and its errors, the worst of all situations."""

    state: State
    point: PlanPoint
    worst: Situation

    @property
    def is_within(self) -> bool:
        """Whether it is within the bounds."""
        return self.point.is_within


class Costs(NamedTuple):
    """Time and memory of a forward and a backward pass, relative to fp32."""

    time: float
    memory: float


class Measurement:
    """Measures mixes of precisions of some models."""

    def __init__(
        self, situations: Sequence[Situation], bounds: Bounds, fp32_cost: float, scale: float
    ) -> None:
        self.situations, self.bounds = list(situations), bounds
        self.fp32_cost, self.scale = fp32_cost, scale
        with situations[0].ready() as comparison:
            setting = comparison.setting
            floats = {p.dtype for p in setting.parameters.values() if p.is_floating_point()}
            if half := floats & LOW.keys():
                raise UnsupportedModel(
                    f"the model has weights of type {half.pop()}: a plan needs weights in float32, "
                    "with autocast"
                )
            self.is_compiled = comparison.is_compiled
            self.device = comparison.devices[0]
            self._modules = {name: module for module, name in setting.names.items()}
            self.tree = ModuleTree.of(setting.names)
            self.work = Survey(comparison, None).work
            self._forward_ms: dict[str, float] = {}
            self._fp32_ms: float | None = None
            if setting.device_type == "cuda":
                with suppress_errors_of_code():  # which may not allow fp32: then nothing is timed
                    self._forward_ms = forward_ms(comparison, Mix(None))
                    self._fp32_ms = step_ms(comparison, Mix(None), 1.0)
        self.is_timed = self._fp32_ms is not None
        #: By precision: own work of each module, and milliseconds.
        self._low: dict[torch.dtype, tuple[Mapping[str, Work], Mapping[str, float]]] = {}

    def groups(self) -> list[tuple[str, ...]]:
        """Return the modules with operations of their own, in groups of equal type and role."""
        groups = self.tree.groups(self.work.keys())
        return [*groups, (LOSS,)] if LOSS in self.work else groups

    def survey(self, dtype: torch.dtype) -> Survey:
        """Survey a forward pass in low precision, on the first batch."""
        with self.situations[0].ready() as comparison:
            survey = Survey(comparison, dtype)
            times = forward_ms(comparison, Mix(dtype)) if self.is_timed else {}
        self._low[dtype] = survey.work, times
        return survey

    def candidate(self, dtype: torch.dtype, state: State, scale: float) -> Candidate:
        """Measure a mix on all situations, the loss scale lowered as by a scaler.

        dtype: float32, or that of autocast, which is surveyed.
        """
        mix = Mix(
            None if dtype == torch.float32 else dtype,
            {self._modules[name]: own for name, own in state.items() if name != LOSS},
            is_loss_in_fp32=LOSS in state,
        )
        while True:
            results = list(self._errors(mix, scale))
            is_finite = math.isfinite(results[-1][1].error)
            if is_finite or dtype != torch.float16 or scale < SCALE_STEP:
                break
            scale /= SCALE_STEP
        worst, errors = max(results, key=lambda result: result[1].error)
        cosine = min(result.cosine for _, result in results)
        by_weights: dict[str, float] = {}
        for situation, result in results:
            label = situation.weights
            by_weights[label] = max(result.error, by_weights.get(label, 0.0))
        whole = Errors(errors.error, errors.largest, cosine, errors.flushed, errors.saturated)
        time, memory = self.costs(dtype, state)
        ms = self._fp32_ms
        if ms is not None and dtype != torch.float32:
            with self.situations[0].ready() as comparison:
                time = step_ms(comparison, mix, scale) / ms
            ms, time = time * ms, round(time, 2)  # beyond that it is noise
        names = {
            kind: [n for n, own in state.items() if own == kind and n != LOSS]
            for kind in (torch.float32, torch.bfloat16)
        }
        point = PlanPoint(
            precision=PRECISIONS[dtype],  # type: ignore[arg-type]
            fp32=self.tree.patterns(names[torch.float32]),
            bf16=self.tree.patterns(names[torch.bfloat16]),
            is_loss_in_fp32=LOSS in state,
            init_scale=scale if dtype == torch.float16 else None,
            error=errors.error,
            by_weights=by_weights,
            cosine=cosine,
            is_within=self.bounds.admit(whole),
            time=round(time, 4),
            memory=round(memory, 4),
            ms=ms,
        )
        return Candidate(state, point, worst)

    def _errors(self, mix: Mix, scale: float) -> Iterator[tuple[Situation, Errors]]:
        """Yield the errors of each situation, until one is not finite."""
        for situation in self.situations:
            with situation.ready() as comparison:
                errors = comparison.errors(mix, scale, situation.references)
            yield situation, errors
            if not math.isfinite(errors.error):
                return

    def costs(self, dtype: torch.dtype, state: State) -> Costs:
        """Return the costs of a mix by counted operations and results."""
        if dtype == torch.float32:
            return Costs(1.0, 1.0)
        in_fp32 = self.tree.cover(n for n, own in state.items() if own == torch.float32)
        low = self._low[dtype][0]
        operations, slow, size, whole = 0, 0, 0, 0
        for name in self.work.keys() | low.keys():
            own = self.work.get(name, Work(0, 0))
            operations += own.operations
            slow += own.operations if name in in_fp32 else 0
            size += own.bytes if name in in_fp32 else low.get(name, Work(0, 0)).bytes
            whole += own.bytes
        if not operations:
            return Costs(1.0, size / (whole or 1))
        relative = (operations - slow + self.fp32_cost * slow) / (self.fp32_cost * operations)
        return Costs(relative, size / (whole or 1))

    def fp32_ms(self, names: Iterable[str], dtype: torch.dtype) -> float:
        """Return the milliseconds that modules' own operations take longer in fp32, forward."""
        low = self._low[dtype][1]
        return sum(self._forward_ms.get(name, 0.0) - low.get(name, 0.0) for name in names)

    def move_cost(self, names: Iterable[str], dtype: torch.dtype) -> float:
        """Return what fp32 instead of a low precision adds in time and in memory.

        Each as a share of a step in low precision.
        """
        state = dict.fromkeys(names, torch.float32)
        before, after = self.costs(dtype, {}), self.costs(dtype, state)
        time = (after.time - before.time) / before.time
        if self.is_timed:
            forward = sum(self._low[dtype][1].values()) or 1.0
            time = max(0.0, self.fp32_ms(self.tree.cover(names), dtype) / forward)
        return time + max(0.0, after.memory - before.memory) / (before.memory or 1.0)

    def batch_deviation(self) -> float | None:
        """Return the standard deviation of batches' gradients, relative to their mean's length.

        None with a single batch of each weights.
        """
        squares: list[float] = []
        means: list[float] = []
        for weights in dict.fromkeys(situation.weights for situation in self.situations):
            of_batches = [s.references for s in self.situations if s.weights == weights]
            if len(of_batches) < 2:
                continue
            for key in of_batches[0]:
                stacked = torch.stack([_of(batch, key, of_batches[0]) for batch in of_batches])
                mean = stacked.mean(0)
                square = float((stacked - mean).double().square().sum())
                squares.append(square / (len(of_batches) - 1))
                means.append(float(mean.double().square().sum()))
        return math.sqrt(sum(squares) / sum(means)) if sum(means) else None


@contextmanager
def suppress_errors_of_code() -> Iterator[None]:
    """Suppress errors of the model's code, which may not allow a precision; not lack of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return


def _of(gradients: Mapping[int, Tensor], key: int, like: Mapping[int, Tensor]) -> Tensor:
    return gradients.get(key, torch.zeros_like(like[key]))
