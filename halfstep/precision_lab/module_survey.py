"""Errors of modules: of each one's own operations, and those that it causes alone.

A module's *own* operations are those outside of the modules in it: attention between two
projections, a softmax, a sum of branches. This module imports torch.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from halfstep.precision_lab.call_records import Leaves, intercept, is_float
from halfstep.precision_lab.comparison import SCALE_STEP, Comparison, Mix
from halfstep.precision_lab.suggestions import LOSS

#: Passes that are timed on a device after a first one, which compiles and allocates.
TIMED_PASSES = 5
#: dtypes of the floating tensors among some leaves, by position.
Types = list[torch.dtype | None]


class Work(NamedTuple):
    """A module's own share of a forward pass."""

    operations: int  # of matrix products, convolutions and attention
    bytes: int  # of the results, without autocast's copies of the weights


class Survey:
    """Own work of each module in a forward pass, and the dtypes of its arguments and results."""

    def __init__(self, comparison: Comparison, dtype: torch.dtype | None) -> None:
        """Make the forward pass; inside of `comparison.preserve`.

        dtype: of autocast; None: as the reference.
        """
        self._names, self._dtype = comparison.setting.names, dtype
        self._types: dict[nn.Module, tuple[Types, Types]] = {}
        counter = OwnWork()

        def call(module: nn.Module, run: Callable[..., object], args: Any, kwargs: Any) -> object:
            if module not in self._names:
                return run(*args, **kwargs)
            with counter.inside(self._names[module]):
                result = run(*args, **kwargs)
            types = (dtypes_of(Leaves((args, kwargs))), dtypes_of(Leaves(result)))
            self._types.setdefault(module, types)
            return result

        is_reference = dtype is None
        precision = (
            comparison.in_reference() if is_reference else comparison.compute_mixed(Mix(dtype))
        )
        with (
            comparison.one_pass(is_reference=is_reference),
            precision,
            intercept(call),
            counter,
        ):
            comparison.closure()
        self.work = counter.work()

    def measure_isolated_error(
        self,
        comparison: Comparison,
        names: Collection[str],
        scale: float,
        references: Mapping[int, Tensor],
    ) -> float:
        """Return the whole gradient's error with only modules' own operations in low precision.

        Their arguments, and the results of the modules in them, are rounded as in the surveyed
        pass. If the scaled gradients overflow, smaller scales are tried.
        comparison: prepared, of the same models.
        """
        while True:
            with comparison.one_pass():
                region = self._isolate(comparison.setting.device_type, names)
                error = comparison.errors_in(region, scale, references).error
            if math.isfinite(error) or scale < SCALE_STEP:
                return error
            scale /= SCALE_STEP

    @contextmanager
    def _isolate(self, device_type: str, names: Collection[str]) -> Iterator[None]:
        stack = [LOSS in names]  # whether the calling module computes in low precision

        def call(module: nn.Module, run: Callable[..., object], args: Any, kwargs: Any) -> object:
            name = self._names.get(module)
            if name is None:
                return run(*args, **kwargs)
            is_low, is_caller_low = name in names, stack[-1]
            given, returned = self._types.get(module, ([], []))
            args, kwargs = as_types((args, kwargs), given if is_low else [])
            stack.append(is_low)
            try:
                with torch.autocast(device_type, self._dtype, enabled=is_low):
                    result = run(*args, **kwargs)
            finally:
                stack.pop()
            return as_types(as_types(result, []), returned if is_caller_low else [])

        region = torch.autocast(device_type, self._dtype, enabled=stack[0])
        with intercept(call), region:
            yield


class OwnWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and results by the module whose forward method runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack = [LOSS]
        self._operations: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Count for a module."""
        self._stack.append(name)
        try:
            yield
        finally:
            self._stack.pop()

    def work(self) -> dict[str, Work]:
        """Return the work of modules that have operations of their own, in order of the calls."""
        return {name: Work(self._operations[name], self._bytes[name]) for name in self._bytes}

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = self._stack[-1]
        is_cast = func.overloadpacket is torch.ops.aten._to_copy  # of a weight by autocast
        is_view = any(returned.alias_info for returned in func._schema.returns)
        if not is_view and not (is_cast and isinstance(args[0], nn.Parameter)):
            floats = [v for v in tree_leaves(result) if is_float(v)]
            if floats:
                self._bytes[name] += sum(v.numel() * v.element_size() for v in floats)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._operations[name] += int(count(*args, **kwargs, out_val=result))
        elif "_scaled_dot_product" in func.overloadpacket.__name__:  # the CPU's kernel
            self._operations[name] += _attention(*args[:3])
        return result


def forward_ms(comparison: Comparison, mix: Mix) -> dict[str, float]:
    """Return the milliseconds of each module's own operations in a forward pass, by CUDA events.

    mix: without modules of their own precision.
    """
    names = comparison.setting.names
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(TIMED_PASSES + 1):
        spans: list[tuple[str, str, Any, object]] = []  # module, its caller, start and end
        stack = [LOSS]

        def call(
            module: nn.Module,
            run: Callable[..., object],
            args: tuple[object, ...],
            kwargs: dict[str, object],
            stack: list[str] = stack,
            spans: list[tuple[str, str, object, object]] = spans,
        ) -> object:
            if module not in names:
                return run(*args, **kwargs)
            start, end = cuda_event(), cuda_event()
            stack.append(names[module])
            start.record()
            try:
                return run(*args, **kwargs)
            finally:
                end.record()
                spans.append((stack.pop(), stack[-1], start, end))

        first, last = cuda_event(), cuda_event()
        with comparison.one_pass(is_plain=True), comparison.compute_mixed(mix), intercept(call):
            first.record()
            comparison.closure()
            last.record()
        last.synchronize()
        own: dict[str, float] = defaultdict(float)
        for name, caller, start, end in [*spans, (LOSS, "", first, last)]:
            elapsed = start.elapsed_time(end)
            own[name] += elapsed
            own[caller] -= elapsed
        if number:
            for name in own.keys() - {""}:
                samples[name].append(own[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def step_ms(comparison: Comparison, mix: Mix, scale: float) -> float:
    """Return the milliseconds of a forward and a backward pass, by CUDA events."""
    samples: list[float] = []
    for _ in range(TIMED_PASSES + 1):
        start, end = cuda_event(), cuda_event()
        with comparison.one_pass(is_plain=True), comparison.compute_mixed(mix):
            start.record()
            comparison.compute_scaled_gradients(comparison.closure(), scale)
            end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return statistics.median(samples[1:])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    return int(sdpa_flop_count(q.shape, k.shape, v.shape))  # type: ignore[no-untyped-call]


def cuda_event() -> torch.cuda.Event:
    """Return an event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def dtypes_of(leaves: Leaves) -> Types:
    """Return the dtypes of the floating tensors among leaves."""
    return [value.dtype if is_float(value) else None for value in leaves.flat]


def as_types(tree: object, types: Types) -> Any:
    """Return a tree with floats in these dtypes; without dtypes half precision in float32."""
    leaves = Leaves(tree)
    if len(types) != len(leaves.flat):
        types = [torch.float32 if is_half(value) else None for value in leaves.flat]
    pairs = zip(leaves.flat, types, strict=True)
    return leaves.rebuild([v.to(t) if t is not None and is_float(v) else v for v, t in pairs])


def is_half(value: object) -> bool:
    """Return whether a value is a tensor in half precision."""
    return is_float(value) and value.dtype in (torch.float16, torch.bfloat16)
