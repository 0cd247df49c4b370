"""What a recipe is: models, optimizers, data and losses. The training loop does all the rest.

A recipe is a class with a pydantic configuration. Register it as an entry point of the group
`halfstep.recipes`, or name it by its file: `path/to/file.py:MyRecipe`. All that it imports of us
is here; torch and pydantic come with `pip install 'halfstep[recipe]'`.
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
    """A scalar to minimise, and the optimizer that minimises it, or the optimizers.

    Several take one loss where a network is shared out among them: Muon for its matrices, say, and
    AdamW for the rest.
    """

    value: Tensor  # 0-dimensional
    optimizer: str | tuple[str, ...]

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The optimizers that get its gradients."""
        return (self.optimizer,) if isinstance(self.optimizer, str) else tuple(self.optimizer)


class RecipeError(Exception):
    """A recipe that cannot be trained as it is written; the message says what to change."""


def place(make: Callable[[], nn.Module], config: RunConfig[Any], device: torch.device) -> nn.Module:
    """Return a network on its device, or, with training.parallel fsdp, where it is cut from.

    As `make().to(device)`, for networks that no device holds: rank 0 makes it on its host, the
    others learn its shapes and what random numbers come next. The shards get rank 0's weights.
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
    """Give a network without memory some that nobody touches, and tie again what was tied."""
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
    """Set the class attributes; make modules, optimizers and data in `__init__`.

    Call the networks as `self.modules["name"](…)`: with several devices the loop puts
    DistributedDataParallel there. Keep the parameters in fp32; autocast casts what may be cast.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    Config: ClassVar[type[RecipeConfig]] = RecipeConfig
    defaults: ClassVar[dict[str, Any]] = {}  # {"training": {"steps": 400}, …}

    _train_size: int = 0
    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    dataset: Dataset[Any] | None = None  # the training data; or override `batch`
    tokens_per_example: int | None = None  # for tokens/s, where an example is made of them
    scaler: GradScaler  # the loop's own; a gradient penalty needs it
    on_log: Callable[[Mapping[str, Any]], None] | None = None  # the loop's own, too

    @abstractmethod
    def __init__(self, config: RunConfig[Any], device: torch.device) -> None: ...

    @property
    def train_size(self) -> int:
        """Examples in the training data: the dataset's length, or what was set; 0: not known."""
        return len(self.dataset) if isinstance(self.dataset, Sized) else self._train_size

    @train_size.setter
    def train_size(self, size: int) -> None:
        self._train_size = size

    def collate(self, examples: list[Any]) -> Any:
        """Make a batch, still on the host, of examples of the dataset.

        In a worker process, as `dataset[index]` is: it sees the recipe as `__init__` left it. What
        either draws from the global generators of random, numpy or torch is seeded by its place in
        the run, so that it is the same in whichever process it is drawn, and when resumed.
        """
        return default_collate(examples)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
        """Return these training examples, on the device: for data that lie there already.

        Override it, or set `self.dataset`, which workers then read ahead.

        indices: int64 on the host, pinned on CUDA, so `indices.to(device, non_blocking=True)`
        does not wait.  generator: for augmentation; seeded anew for each batch, by its place in
        the run, so that a resumed run augments alike.
        """
        raise NotImplementedError

    @abstractmethod
    def training_step(self, batch: Any) -> Iterator[Loss | tuple[Loss, ...]]:
        """Yield a loss for each optimizer to step.

        When the generator goes on after a yield, that optimizer has stepped. Losses that share a
        graph are yielded together, `yield Loss(a, "one"), Loss(b, "other")`: both are
        back-propagated, each to its own optimizer, before either steps.

        It runs under autocast, its losses are averaged over accumulated batches, and it must not
        ask the device for a value (`.item()`, `.cpu()`, `if tensor`): the host would wait for it.
        With accumulation it runs several times a step, so what belongs to a step as a whole, such
        as a moving average of the weights, goes into `after_step`.
        """

    def flops(self) -> float | None:
        """Return the floating-point operations that an example takes, forward and backward.

        They say how much of the device the run uses. `halfstep.monitor.flops.count_flops` counts
        them. The loop asks once, before the first step.
        """
        return None

    def log(self, values: Mapping[str, Any]) -> None:
        """Tell numbers of the step under way: `self.log({"train/accuracy": hits.float().mean()})`.

        Now and then also what is to be seen or heard, as `watch.log` takes it: images, texts,
        tables, `halfstep.Histogram`, `halfstep.Audio`. For pixels on a device it is waited.

        A tensor of one number is brought to the host without a wait. Of several calls in a step,
        for its micro-batches say, the mean is told; with several devices, the first one's. What is
        told in an evaluation or a replay is nobody's step, and left out.
        """
        if self.on_log is not None:
            self.on_log(values)

    def after_step(self) -> None:  # noqa: B027 - most recipes have no use for it
        """Do what is due once a step, when it has been queued; skipped or not, the host cannot say.

        Neither under autocast nor with gradients, and never in a replay.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what decides later steps besides modules and optimizers, for the checkpoint.

        Plain tensors, numbers, strings and containers of them: an iterator's position, a counter.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - likewise
        """Put back what `state_dict` returned."""

    def evaluate(self) -> dict[str, float]:
        """Return metrics, such as `{"val/accuracy": 0.97}`; runs in eval mode, without gradients.

        Here waiting for the device is fine.
        """
        return {}

    def artifacts(self) -> dict[str, Any]:
        """Return what to look at, such as `{"samples.txt": "…"}`; text is stored as UTF-8.

        Bytes are a file of that name; anything else that `log` takes is made one.

        Called after each evaluation, in eval mode, without gradients, on every rank. A name has a
        suffix and no folder.
        """
        return {}
