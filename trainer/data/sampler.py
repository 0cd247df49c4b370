"""The sampler: the examples of each step, in a seeded order per epoch.

All examples form one endless stream, epoch 0's order followed by epoch 1's, and so on. The only
state is the position in it, so a run can be resumed anywhere at once (see order.py): the same seed
and position give the same examples on any machine and in any process.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.config_groups import Training
from halfstep.run_config import ConfigError
from trainer.data.order import Order
from trainer.repeatability import seed_of_place

UNKNOWN_SIZE = 0  # of a stream


class Sampler:
    """Yields micro-batches of indices and advances the position.

    With W ranks, batch size B and A accumulation steps, a step takes the next A·W·B examples of the
    stream; rank r's share of micro-batch a is the (a·W + r)-th part of it.
    """

    def __init__(
        self,
        size: int,
        training: Training,
        *,
        rank: int = 0,
        world_size: int = 1,
        pin: bool = False,
    ) -> None:
        self.position = 0  # examples used, over all ranks
        self._size = size
        self._training = training
        self.rank = rank
        self.world_size = world_size
        self._order = self._new_order(pin=pin)
        self._generator = torch.Generator()

    @property
    def examples_in_a_step(self) -> int:
        """Number of examples per step, over all ranks."""
        return self._training.accumulation_steps * self.examples_in_a_pass

    def starts(self) -> Iterator[int]:
        """Yield the start of each micro-batch of the next step in the stream."""
        for _ in range(self._training.accumulation_steps):
            start = self.position + self.rank * self._training.batch_size
            self.position += self.examples_in_a_pass
            yield start

    def starts_in(self, position: int) -> Iterator[int]:
        """Yield the same for the step at a position, without advancing."""
        first = position + self.rank * self._training.batch_size
        for number in range(self._training.accumulation_steps):
            yield first + number * self.examples_in_a_pass

    def indices(self, start: int) -> Tensor:
        """Return the indices (B,) of the micro-batch at `start`.

        They are on the host; pinned if `pin`, so that the copy to a GPU can be asynchronous.
        """
        return self._order.take(start, self._training.batch_size)

    def generator(self, start: int) -> torch.Generator:
        """Return the shared generator, seeded for the augmentation of a micro-batch."""
        return self._generator.manual_seed(seed_of_place(b"augment", self._training.seed, start))

    def shares_from(self, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the start and indices of every micro-batch from `start` on, endlessly.

        Independent of the sampler's state, so another thread may iterate over it.
        """
        order = self._new_order()
        for place in itertools.count(start, self.examples_in_a_pass):
            yield place, order.take(place, self._training.batch_size).tolist()

    @property
    def examples_in_a_pass(self) -> int:
        """Number of examples per micro-batch, over all ranks."""
        return self.world_size * self._training.batch_size

    def _new_order(self, *, pin: bool = False) -> Order:
        training = self._training
        return Order(self._size, training.seed, shuffle=training.shuffle, pin=pin)


def check_batch(training: Training, train_size: int, recipe: str, world_size: int = 1) -> None:
    """Raise ConfigError if one step would need more examples than there are."""
    others = training.accumulation_steps * world_size
    if training.batch_size * others <= train_size or train_size == UNKNOWN_SIZE:
        return
    size = f"training.batch_size is {training.batch_size}"
    if training.accumulation_steps > 1:
        size += f" × {training.accumulation_steps} accumulation steps"
    if world_size > 1:
        size += f" × {world_size} devices"
    raise ConfigError(
        f"{size}, but {recipe} has {train_size} training examples: "
        f"choose at most {train_size // others}"
    )
