"""The recipes' entries in the corpus: trained by the trainer's own loop."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from halfstep.recipe import Recipe
from halfstep.run_config import parse_config
from halfstep.telemetry.events import Event, Metric
from tests.diagnosis.parts import DEVICE
from tests.diagnosis.recipes import networks
from tests.diagnosis.registry import HEALTHY, LOOPS, PRECISION, SCALE, Handle, Loop, WatchCall
from trainer.loop import train
from trainer.setup import prepare_run

ALL_THREE = ("fp16", "bf16", "fp32")


def case(
    recipe: type[Recipe],
    cause: str,
    harmful: Iterable[str] = (),
    *,
    precisions: Sequence[str] = ("fp16",),
    accepts: Iterable[str] = (),
) -> None:
    """Register a recipe, once for each precision."""
    for precision in precisions:
        name = f"recipe-{recipe.name}-{precision}"
        LOOPS[name] = Loop(
            name=name,
            train=lambda watch, values={"precision": precision}: train_recipe(
                recipe, values, watch
            ),
            cause=cause,
            accepts=frozenset(accepts),
            harmful=frozenset(harmful),
            precision=precision,
            seed=0,
            processes=1,
            raises="",
            file=inspect.getfile(recipe),
            recipe=recipe,
        )


def train_recipe(
    recipe: type[Recipe],
    values: Mapping[str, Any],
    watch: WatchCall,
    items: list[Any] | None = None,
) -> None:
    """Train a recipe as the trainer does. items: receives its events in order."""
    handles: list[Handle] = []

    class Seen(recipe):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, device: torch.device) -> None:
            super().__init__(config, device)
            handles.append(watch(*self.modules.values()))

    result: list[Any] = [] if items is None else items

    def on_event(event: Event) -> None:
        result.append(event)
        if isinstance(event, Metric):
            handles[0].log({event.name: event.value})

    config = parse_config(recipe, dict(values))
    train(
        prepare_run(
            Seen, config, device=torch.device(DEVICE), on_steps=result.append, on_event=on_event
        )
    )


case(networks.Sound, HEALTHY, precisions=ALL_THREE)
case(networks.Convolutional, HEALTHY, precisions=ALL_THREE)
case(
    networks.RootAtZero,
    "singular_gradient",
    {*SCALE, *PRECISION, "lower_rate", "clip", "zero_grad", "unscale", "restore"},
    precisions=ALL_THREE,
    accepts=["nonfinite_without_scaler"],
)
case(
    networks.LossOfZero,
    "zero_gradients",
    {*SCALE, *PRECISION, "lower_rate", "eps"},
    precisions=ALL_THREE,
)
case(networks.WideInputs, "forward_overflow", {*SCALE, "eps", "restore"})
case(networks.SteepLoss, "backward_overflow", {"larger_scale", "eps", "restore"})
case(
    networks.MissingValues,
    "nonfinite_inputs",
    {*SCALE, *PRECISION, "lower_rate", "eps", "clip"},
    precisions=ALL_THREE,
)
case(
    networks.UnusedHead,
    "no_gradient",
    {*SCALE, *PRECISION, "lower_rate", "eps"},
    precisions=ALL_THREE,
)
case(networks.BrightPicture, "nonfinite_buffers", {*SCALE, "lower_rate", "eps"})
case(
    networks.RateBeyondReason,
    "nonfinite_without_scaler",
    {*SCALE, "eps", "restore"},
    precisions=("bf16", "fp32"),
)
case(
    networks.EmptyValidation,
    "metric_nonfinite",
    {*SCALE, *PRECISION, "lower_rate", "eps"},
    precisions=ALL_THREE,
)
