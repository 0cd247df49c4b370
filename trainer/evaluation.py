"""Evaluation between steps: metrics, metrics of the averaged weights, artifacts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfstep.recipe import Recipe
from trainer.checkpoints import checkpoint
from trainer.ema import PREFIX, Ema


def evaluate(recipe: Recipe, autocast: torch.autocast) -> dict[str, float]:
    """Return the recipe's metrics. The host may wait for the device."""
    with torch.no_grad(), evaluation_mode(recipe), autocast:
        return recipe.evaluate()


def evaluate_average(
    ema: Ema, recipe: Recipe, autocast: torch.autocast, device: torch.device
) -> dict[str, float]:
    """Return the metrics of the averaged weights, without affecting random states of training."""
    random = checkpoint.random_state(device)
    try:
        with ema.in_place():
            metrics = evaluate(recipe, autocast)
    finally:
        checkpoint.restore_random_state(random, device)
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def make_artifacts(recipe: Recipe, autocast: torch.autocast) -> dict[str, object]:
    """Return the artifacts of the recipe."""
    with torch.no_grad(), evaluation_mode(recipe), autocast:
        return recipe.artifacts()


@contextmanager
def evaluation_mode(recipe: Recipe) -> Iterator[None]:
    """Disable dropout and batch statistics temporarily; modules already in eval mode stay so."""
    parts = [part for module in recipe.modules.values() for part in module.modules()]
    were_training = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, was_training in zip(parts, were_training, strict=True):
            part.training = was_training
