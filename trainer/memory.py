"""Device memory that recipes need before their first batch: `python -m trainer.memory gpt`.

Counted on the meta device, whose tensors have no memory, with the recipe's defaults: a network of
any size is counted on any machine. Activations depend on the batch and are not counted. Prints one
JSON object by reference; recipes that cannot be created there, for example because they read values
of their tensors, are left out.
"""

import os
import sys
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor, nn

from halfstep.machine_offer import RecipeMemory
from halfstep.recipe import Recipe
from halfstep.run_config import parse_config
from trainer.registry import load_recipe

#: Layers whose weights autocast casts, and caches until the step's end.
CAST = (nn.Linear, nn.modules.conv._ConvNd)
HALF_BYTES = 2


def main() -> None:
    """Count the memory of the recipes on the command line."""
    os.nice(19)  # training has precedence
    counted = {}
    for reference in sys.argv[1:]:
        try:
            counted[reference] = count(load_recipe(reference))
        except (Exception, SystemExit) as error:  # one broken recipe must not hide the others
            sys.stderr.write(f"{reference}: {type(error).__name__}: {error}\n")
    sys.stdout.write(msgspec.json.encode(counted).decode() + "\n")


def count(recipe_class: type[Recipe]) -> RecipeMemory:
    """Return bytes of weights, gradients, optimizer state, and half-precision copies.

    weights: with buffers, in the recipe's dtypes.  casts: with autocast.
    """
    # Fused optimizers do not support the meta device, and have the same state.
    config = parse_config(recipe_class, {"training": {"fused": False}})
    with torch.device("meta"):
        recipe = recipe_class(config, torch.device("meta"))
        weights = {p for module in recipe.modules.values() for p in module.parameters()}
        trained = [p for p in weights if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        for optimizer in recipe.optimizers.values():
            optimizer.step()
    buffers = {b for module in recipe.modules.values() for b in module.buffers()}
    states = [
        value
        for optimizer in recipe.optimizers.values()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return RecipeMemory(
        weight_bytes=_bytes({*weights, *buffers}),
        gradient_bytes=_bytes(trained),
        optimizer_bytes=_bytes(states),
        cast_bytes=HALF_BYTES * sum(parameter.numel() for parameter in _cast(recipe)),
    )


def _cast(recipe: Recipe) -> set[Tensor]:
    layers = [
        layer
        for module in recipe.modules.values()
        for layer in module.modules()
        if isinstance(layer, CAST)
    ]
    parameters = {p for layer in layers for p in layer.parameters(recurse=False)}
    return {parameter for parameter in parameters if parameter.dtype == torch.float32}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()
