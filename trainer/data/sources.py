"""Sources of micro-batches: drawn by the recipe, or read from its dataset."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from halfstep.config_groups import Training
from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from trainer.data.examples import Examples, Share, as_in_a_worker, unwrap
from trainer.data.loader import Loader, Plan, Source
from trainer.data.sampler import Sampler
from trainer.data.stream import StreamPlan
from trainer.data.to_device import ToDevice


def make_sources(
    recipe: Recipe,
    sampler: Sampler,
    config: RunConfig,
    device: torch.device,
    on_wait: Callable[[str], None],
) -> tuple[Source, Source | None]:
    """Return the source of a recipe's batches, and one for past batches; None for a stream.

    on_wait: called with a message about a long wait for workers.
    """
    if recipe.dataset is None:
        drawn = Drawn(recipe, sampler)
        return drawn, drawn
    training, data, stride = config.training, config.data, sampler.examples_in_a_pass
    is_stream = isinstance(recipe.dataset, IterableDataset)
    plan: Plan
    if is_stream:
        plan = StreamPlan(recipe, training, data.workers, sampler.rank, sampler.world_size)
    else:
        plan = ExamplesPlan(recipe, sampler, training.seed, data.workers)
    source: Source = ReadHere(plan, stride, device, pin=data.pin)
    if plan.workers:
        source = Loader(plan, stride, data, device, on_wait)
    # A stream cannot be read again, nor in the middle of another pass.
    return source, None if is_stream else ReadHere(plan, stride, device, pin=data.pin)


def make_single_source(recipe: Recipe, config: RunConfig, device: torch.device) -> Source:
    """Return a source of the batches that a training has on its first device, without workers."""
    data = config.data.model_copy(update={"workers": 0})
    here = config.model_copy(update={"data": data})
    sampler = Sampler(recipe.train_size, config.training)
    return make_sources(recipe, sampler, here, device, lambda _: None)[0]


def drawn(recipe: Recipe, indices: Tensor, device: torch.device) -> Any:
    """Return the batch of these examples at the beginning of a run. Raises DataError.

    For a stream, the same number of its first examples.
    """
    if recipe.dataset is None:
        return recipe.batch(indices, torch.Generator().manual_seed(0))
    if isinstance(recipe.dataset, IterableDataset):
        training = Training(batch_size=len(indices))
        read = next(iter(StreamPlan(recipe, training, 0, 0, 1).begin(0, None, lambda _: None)[0]))
    else:
        read = Examples(recipe, 0, lambda _: None)[0, indices.tolist()]
    return ToDevice(device).begin(unwrap(read)[0]).take()


class Drawn(Source):
    """Batches that the recipe draws from data on the device: only the position matters."""

    def __init__(self, recipe: Recipe, sampler: Sampler) -> None:
        self._recipe, self._sampler = recipe, sampler

    def take(self, start: int) -> Any:
        """Let the recipe draw the batch."""
        return self._recipe.batch(self._sampler.indices(start), self._sampler.generator(start))


class ExamplesPlan:
    """Reading strategy of a dataset with indexed examples."""

    def __init__(self, recipe: Recipe, sampler: Sampler, seed: int, workers: int) -> None:
        self.workers = workers
        self._recipe, self._sampler, self._seed = recipe, sampler, seed

    def begin(
        self, start: int, state: Any, began: Callable[[int], None]
    ) -> tuple[Examples, Iterator[Share]]:
        """Return the dataset of micro-batches, and the keys from `start` on."""
        return Examples(self._recipe, self._seed, began), self._sampler.shares_from(start)


class ReadHere(Source):
    """Batches of a dataset that are read in the training process."""

    def __init__(self, plan: Plan, stride: int, device: torch.device, *, pin: bool) -> None:
        self._plan, self._stride = plan, stride
        self._to_device = ToDevice(device, pin=pin)
        self._read: Iterator[Any] | None = None
        self._comes_next = 0

    def take(self, start: int) -> Any:
        """Read the batch and copy it to the device. Raises DataError."""
        with as_in_a_worker():
            if self._read is None or self._comes_next != start:
                batches, keys = self._plan.begin(start, self.state, lambda _: None)
                self._read = iter(batches) if keys is None else map(batches.__getitem__, keys)
            read = next(self._read)
        batch, self.state = unwrap(read)
        self._comes_next = start + self._stride
        return self._to_device.begin(batch).take()

    def load_state(self, state: object) -> None:
        """Restart, with a stream in this state."""
        self._read, self.state = None, state
