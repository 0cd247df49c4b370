"""Base class of recipes: models, optimizers, data and losses without a training loop.

A recipe is a class with a pydantic configuration. Register it as an entry point of the group
`halfstep.recipes`, or name it by its file: `path/to/file.py:MyRecipe`. This module has all that it
imports from halfstep; `pip install 'halfstep[recipe]'` installs torch and pydantic.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from halfstep.config_groups import RecipeConfig
from halfstep.data_paths import data_path
from halfstep.run_config import ConfigError, RunConfig
from halfstep.telemetry.plain_json import JsonObject

__all__ = [
    "ConfigError",
    "Loss",
    "Recipe",
    "RecipeConfig",
    "RecipeError",
    "RunConfig",
    "data_path",
    "place",
]


@dataclass(frozen=True)
class Loss:
    """Scalar to minimize, with the optimizer or optimizers that minimize it.

    Several optimizers take one loss if each has a part of the network's parameters: Muon for its
    matrices, for example, and AdamW for the rest.
    """

    value: Tensor  # 0-dimensional
    optimizer: str | tuple[str, ...]

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names of the optimizers that step on the loss's gradients."""
        return (self.optimizer,) if isinstance(self.optimizer, str) else tuple(self.optimizer)


class RecipeError(Exception):
    """Error in a recipe that prevents training; the message states what to change."""


def place(make: Callable[[], nn.Module], config: RunConfig[Any], device: torch.device) -> nn.Module:
    """Make a network on its device, or with training.parallel fsdp on the host, for sharding.

    Replaces `make().to(device)` for networks larger than a device: rank 0 makes the network on its
    host, the others get only its shapes and the state of the random generators. The shards get
    rank 0's weights.
    """
    if config.training.parallel == "ddp" or not dist.is_initialized():
        return make().to(device)
    is_first = dist.get_rank() == 0
    with nullcontext() if is_first else torch.device("meta"):
        network = make()
    states = [(random.getstate(), np.random.get_state(), torch.get_rng_state())]
    dist.broadcast_object_list(states, 0, device=device)
    if not is_first:
        random.setstate(states[0][0])
        np.random.set_state(states[0][1])
        torch.set_rng_state(states[0][2])
        _fill_in(network)
    return network


def _fill_in(network: nn.Module) -> None:
    """Allocate a meta network's memory uninitialized, and restore its tied weights."""
    places = [
        (owner, name, weight)
        for owner in network.modules()
        for name, weight in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]
    network.to_empty(device="cpu")
    first: dict[nn.Parameter, nn.Parameter] = {}
    for owner, name, weight in places:
        setattr(owner, name, first.setdefault(weight, getattr(owner, name)))


class Recipe(ABC):
    """Base class of recipes.

    Set the class attributes; create modules, optimizers and data in `__init__`. Call the networks
    as `self.modules["name"](…)`: with several devices the loop wraps them there in
    DistributedDataParallel. Keep the parameters in fp32; autocast casts where that is safe.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    Config: ClassVar[type[RecipeConfig]] = RecipeConfig
    defaults: ClassVar[JsonObject] = {}  # {"training": {"steps": 400}, …}

    _train_size: int = 0
    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    dataset: Dataset[Any] | None = None  # the training data; or override `batch`
    tokens_per_example: int | None = None  # for tokens/s, if examples consist of tokens
    scaler: GradScaler  # set by the loop; needed for a gradient penalty
    on_log: Callable[[Mapping[str, Any]], None] | None = None  # set by the loop

    @abstractmethod
    def __init__(self, config: RunConfig, device: torch.device) -> None: ...

    @property
    def train_size(self) -> int:
        """Number of training examples: the dataset's length, or the value set; 0: unknown."""
        return len(self.dataset) if isinstance(self.dataset, Sized) else self._train_size

    @train_size.setter
    def train_size(self, size: int) -> None:
        self._train_size = size

    def collate(self, examples: list[Any]) -> Any:
        """Combine examples of the dataset into a batch on the host.

        Runs in a worker process, as does `dataset[index]`: the recipe is in its state after
        `__init__`. For both, the global generators of random, numpy and torch are seeded by the
        position in the run, so random numbers do not depend on the process or on a resume.
        """
        return default_collate(examples)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
        """Return these training examples on the device, for data that is already there.

        Override this method, or set `self.dataset`, which workers then read ahead.

        indices: int64 on the host, pinned on CUDA, so `indices.to(device, non_blocking=True)`
        does not wait.  generator: for augmentation; seeded for each batch by its position in the
        run, so a resumed run augments identically.
        """
        raise NotImplementedError

    @abstractmethod
    def training_step(self, batch: Any) -> Iterator[Loss | tuple[Loss, ...]]:
        """Yield a loss for each optimizer to step.

        When the generator continues after a yield, that optimizer has stepped. Yield losses that
        share a graph together, `yield Loss(a, "one"), Loss(b, "other")`: both are back-propagated,
        each to its own optimizer, before either steps.

        Runs under autocast; losses are averaged over accumulated batches. It must not read a value
        from the device (`.item()`, `.cpu()`, `if tensor`): the host would wait for it. With
        accumulation it runs several times per step, so put updates that are due once per step,
        such as a moving average of the weights, into `after_step`.
        """

    def flops(self) -> float | None:
        """Return the floating-point operations per example, forward and backward.

        The run's utilization of the device is computed from them.
        `halfstep.watching.flops.count_flops` counts them. Called once, before the first step.
        """
        return None

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values for the current step: `self.log({"train/accuracy": hits.float().mean()})`.

        It also takes the other values of `watch.log`, for occasional use: images, texts,
        tables, `halfstep.Histogram`, `halfstep.Audio`. An image on a device is waited for.

        A tensor of one number is copied to the host without waiting. Several calls in a step, for
        example for its micro-batches, are averaged; with several devices the first one's value is
        logged. Calls in an evaluation or a replay belong to no step and are ignored.
        """
        if self.on_log is not None:
            self.on_log(values)

    def after_step(self) -> None:  # noqa: B027 - most recipes have no use for it
        """Run once per step after it is queued; the host cannot know yet if it was skipped.

        Runs without autocast and without gradients, and never in a replay.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return further state for the checkpoint that later steps depend on.

        Modules and optimizers are saved anyway. Allowed are plain tensors, numbers, strings and
        containers of them, such as an iterator's position or a counter.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - likewise
        """Restore the state that `state_dict` returned."""

    def evaluate(self) -> dict[str, float]:
        """Return metrics, such as `{"val/accuracy": 0.97}`.

        Runs in eval mode, without gradients, and may wait for the device.
        """
        return {}

    def artifacts(self) -> dict[str, Any]:
        """Return files for inspection by name, such as `{"samples.txt": "…"}`.

        Text is stored as UTF-8, bytes unchanged; other values that `log` takes are converted
        to a file. A name has a suffix and no folder.

        Called after each evaluation, in eval mode, without gradients, on every rank.
        """
        return {}
