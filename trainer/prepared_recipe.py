"""A recipe that is ready to train."""

from dataclasses import dataclass

import torch
from torch import nn

from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from trainer.distributed.ranks import Ranks


@dataclass(frozen=True)
class PreparedRecipe:
    """A recipe with its configuration, on a device of one of several ranks."""

    recipe: Recipe
    modules: dict[str, nn.Module]  # the recipe's, without DistributedDataParallel
    config: RunConfig
    device: torch.device
    ranks: Ranks
