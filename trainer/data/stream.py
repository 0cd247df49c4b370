"""Reads an IterableDataset with state, so that a run can be resumed within it.

One process reads it, the training itself or one worker. The state of the dataset is returned with
each batch, and a checkpoint contains the state after the last batch that was trained on, regardless
of prefetching. With several ranks each reads the whole stream and uses its share.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch.utils.data import IterableDataset

from halfstep.config_groups import Training
from halfstep.recipe import Recipe
from trainer.data.examples import (
    NOTHING,
    Failure,
    Read,
    collate_examples,
    failure_of,
    pack,
    seed_by_place,
)


class StreamPlan:
    """Reading strategy of a stream: at most one worker."""

    def __init__(
        self, recipe: Recipe, training: Training, workers: int, rank: int, world_size: int
    ) -> None:
        self.workers = min(workers, 1)
        self._recipe, self._training = recipe, training
        self._rank, self._world_size = rank, world_size

    def begin(
        self, start: int, state: object, began: Callable[[int], None]
    ) -> tuple["Stream", Iterator[object] | None]:
        """Return the stream of micro-batches from this state on."""
        size = self._training.batch_size
        shares = self._rank, self._world_size, size
        first = start - self._rank * size
        return Stream(self._recipe, self._training.seed, shares, first, state, began), None


class Stream(IterableDataset[Any]):
    """A recipe's stream of examples as an endless stream of micro-batches."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        shares: tuple[int, int, int],
        place: int,
        state: object,
        began: Callable[[int], None],
    ) -> None:
        """shares: rank, ranks and batch size.  place: position of the stream in the run.

        state: at this position; None: at the beginning.
        """
        self._dataset: Any = recipe.dataset
        self._collate, self._seed, self._shares = recipe.collate, seed, shares
        self._place, self._state, self._began = place, state, began

    def __iter__(self) -> Iterator[Read | Failure]:
        rank, ranks, size = self._shares
        place = self._place
        try:
            if self._state is not None:
                self._dataset.load_state_dict(deepcopy(self._state))
            examples = self._examples()
        except (Exception, SystemExit) as error:
            yield failure_of("the stream cannot continue", self._dataset, error)
            return
        while True:
            read: list[Any] = []
            try:
                for start in range(place, place + ranks * size):
                    self._began(start)
                    seed_by_place(self._seed, start)
                    read.append(next(examples))
                state = deepcopy(self._dataset.state_dict())
            except (Exception, SystemExit) as error:
                yield failure_of(
                    f"the example at position {place + len(read)}", self._dataset, error
                )
                return
            first = place + rank * size
            own = read[rank * size : (rank + 1) * size]
            names = list(range(first, first + size))
            batch = collate_examples(self._collate, own, names, self._seed, first)
            self._began(NOTHING)
            yield pack(batch if isinstance(batch, Failure) else (batch[0], state), names)
            place += ranks * size

    def _examples(self) -> Iterator[object]:
        is_resumed = self._state is not None
        while True:
            count = 0
            for example in self._dataset:
                yield example
                count += 1
            if not (count or is_resumed):
                raise ValueError("it ends before its first example")
            is_resumed = False  # it may have been at its end
