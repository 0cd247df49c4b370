"""Which training examples a step sees: a seeded permutation of each epoch, one after another.

All examples form one endless stream, epoch 0's permutation followed by epoch 1's, and so on. The
only state is the position in it, so a run can be resumed anywhere. There are no worker processes
and no global random state: the same seed and position give the same examples on any machine.
"""

import struct
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.run_config import ConfigError, Training


class Sampler:
    """Hands out micro-batches of indices and moves on.

    With W ranks, batch size B and A accumulation steps, a step takes the next A·W·B examples of
    the stream; rank r's share of micro-batch a is the (a·W + r)-th part of it.
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
        self.position = 0  # examples handed out, over all ranks
        self._size = size
        self._training = training
        self._rank = rank
        self._world_size = world_size
        self._pin = pin
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)
        self._generator = torch.Generator()

    @property
    def examples_in_a_step(self) -> int:
        """How far a step moves the position."""
        return self._training.accumulation_steps * self._world_size * self._training.batch_size

    def step(self) -> Iterator[tuple[Tensor, torch.Generator]]:
        """Yield the indices (B,) of each micro-batch, and a generator to augment it with.

        The indices are on the host; pinned, if asked for, so that the copy to a GPU can overlap.
        """
        size = self._training.batch_size
        for _ in range(self._training.accumulation_steps):
            start = self.position + self._rank * size
            self.position += self._world_size * size
            self._generator.manual_seed(_seed(b"augment", self._training.seed, start))
            yield self._take(start, size), self._generator

    def _take(self, start: int, count: int) -> Tensor:
        epoch, offset = divmod(start, self._size)
        head = self._of_epoch(epoch)[offset : offset + count]
        if len(head) == count:
            return head
        joined = torch.cat([head, self._of_epoch(epoch + 1)[: count - len(head)]])
        return joined.pin_memory() if self._pin else joined

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            permutation = self._order(epoch)
            self._permutation = permutation.pin_memory() if self._pin else permutation
            self._epoch = epoch
        return self._permutation

    def _order(self, epoch: int) -> Tensor:
        if not self._training.shuffle:
            return torch.arange(self._size)
        generator = torch.Generator().manual_seed(_seed(b"permute", self._training.seed, epoch))
        return torch.randperm(self._size, generator=generator)


def check_batch(training: Training, train_size: int, recipe: str, world_size: int = 1) -> None:
    """Raise ConfigError if one step would need more examples than there are."""
    others = training.accumulation_steps * world_size
    if training.batch_size * others <= train_size:
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


def _seed(purpose: bytes, seed: int, place: int) -> int:
    # A CPU generator uses 32 bits of its seed; a checksum of everything spreads over all of them.
    return zlib.crc32(purpose + struct.pack("<qq", seed, place))
