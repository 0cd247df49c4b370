"""The corpus: training loops, each with the cause that must be named first for it."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from halfstep.recipe import Recipe

#: Slugs of db.health.findings' causes, the gravest first; docs/reference/diagnosis.md has a section
#: for each.
CAUSES = (
    "forward_overflow",
    "backward_overflow",
    "singular_gradient",
    "undefined_forward",
    "loss_not_scaled",
    "scaler_call_order",
    "gradients_not_cleared",
    "scaler_not_restored",
    "scaled_gradients_clipped",
    "step_outside_scaler",
    "step_left_out",
    "no_gradient",
    "zero_gradients",
    "no_optimizer_step",
    "nonfinite_buffers",
    "nonfinite_inputs",
    "nonfinite_without_scaler",
    "adam_eps_underflow",
    "scaler_without_fp16",
    "fp16_gradients",
    "schedule_in_skipped_steps",
    "metric_nonfinite",
    "no_inf_checks",
)
#: Causes that only armed steps show; their loops are the held-out ones.
SHADOW_CAUSES = (
    "state_rounded",
    "validation_overflow",
    "rounding",
    "carried",
    "loss_differs",
    "integers_differ",
    "rejected",
    "kept_rounded",
    "gradients_underflow",
    "gradients_differ",
    "update_lost",
    "scaled_by_another",
    "scaled_gradients_compared",
    "scaled_gradients_edited",
    "scaled_gradients_in_loss",
    "scaled_gradients_kept",
    "gradients_not_scaled",
    "gradients_cleared_before_step",
    "gradients_edited_after_step",
    "stale_weight_cache",
)
HEALTHY = "healthy"
#: Remedies that would harm some loop; tests.diagnosis.remedies reads them off a finding.
REMEDIES = frozenset(
    {
        "bf16",
        "fp32",
        "lower_rate",
        "smaller_scale",
        "larger_scale",
        "growth_interval",
        "eps",
        "restore",
        "zero_grad",
        "unscale",
        "clip",
    }
)
#: The remedies that are about the loss scale.
SCALE = frozenset({"smaller_scale", "larger_scale", "growth_interval"})
PRECISION = frozenset({"bf16", "fp32"})


class Handle(Protocol):
    """Return type of `watch`: halfstep.Watch, or a stand-in that does nothing."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None: ...

    def loss(self, loss: Any) -> None: ...

    def resume(self, step: int) -> None: ...

    def finish(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> None: ...


class WatchCall(Protocol):
    """halfstep.watch, or a function that takes the same and watches nothing."""

    def __call__(self, *modules: nn.Module, **options: Any) -> Handle: ...


@dataclass(frozen=True)
class Loop:
    """A training loop with its registered cause."""

    name: str
    train: Callable[[WatchCall], object]
    cause: str
    #: Causes that are right as well, where torch leaves two views of one slip.
    accepts: frozenset[str]
    #: Remedies, words of REMEDIES, that would do this loop harm.
    harmful: frozenset[str]
    precision: str
    seed: int
    #: Processes that train together, over gloo; 1: in the calling process.
    processes: int
    #: What it raises, as its type and the beginning of its message; "" if nothing.
    raises: str
    file: str
    #: A recipe, which the trainer trains; None: a script, which is watched.
    recipe: type[Recipe] | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether the loop has no mistake."""
        return self.cause == HEALTHY


LOOPS: dict[str, Loop] = {}


def loop(
    *,
    cause: str,
    harmful: Iterable[str] = (),
    precision: str = "fp16",
    variants: Sequence[Mapping[str, Any]] = ({},),
    accepts: Iterable[str] = (),
    seed: int = 0,
    processes: int = 1,
    raises: str = "",
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register a training function, once for each variant; a variant's values are its arguments.

    The keys "precision" and "seed" of a variant also set the loop's; the function need not take
    them.
    """
    assert cause in (*CAUSES, HEALTHY), f"cause = {cause!r}: must be one of {CAUSES} or {HEALTHY!r}"
    unknown = frozenset(harmful) - REMEDIES
    assert not unknown, f"harmful = {sorted(unknown)}: must be among {sorted(REMEDIES)}"

    def register(function: Callable[..., object]) -> Callable[..., object]:
        taken = inspect.signature(function).parameters
        for variant in variants:
            arguments = {name: value for name, value in variant.items() if name in taken}
            parts = [function.__name__, *(_part(name, each) for name, each in variant.items())]
            name = "-".join(filter(None, parts))
            assert name not in LOOPS, f"there are two loops {name!r}"
            LOOPS[name] = Loop(
                name=name,
                train=_bind(function, arguments),
                cause=cause,
                accepts=frozenset(accepts),
                harmful=frozenset(harmful),
                precision=variant.get("precision", precision),
                seed=variant.get("seed", seed),
                processes=processes,
                raises=raises,
                file=inspect.getfile(function),
            )
        return function

    return register


def _part(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else ""
    return str(value) if isinstance(value, str) else f"{name}{value:g}"


def _bind(
    function: Callable[..., object], arguments: dict[str, Any]
) -> Callable[[WatchCall], object]:
    return lambda watch: function(watch, **arguments)


def sample() -> list[Loop]:
    """Return one loop of each cause, and six healthy ones of one process."""
    chosen: dict[str, list[Loop]] = {}
    for each in sorted(LOOPS.values(), key=lambda loop: loop.recipe is not None):
        if each.processes == 1:
            chosen.setdefault(each.cause, []).append(each)
    healthy = chosen.pop(HEALTHY, [])
    return [loops[0] for loops in chosen.values()] + healthy[:: max(1, len(healthy) // 6)][:6]
