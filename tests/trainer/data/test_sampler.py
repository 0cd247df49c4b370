import pytest
import torch

from halfstep.config_groups import Training
from halfstep.run_config import ConfigError
from tests.trainer.conftest import drawn
from trainer.data.sampler import Sampler, check_batch


def take(sampler, steps):
    """Return the indices of some steps in one list."""
    return [index for _ in range(steps) for batch, _ in drawn(sampler) for index in batch.tolist()]


def test_every_example_comes_once_an_epoch():
    """Batches cross the end of an epoch, so every example comes once in each."""
    indices = take(Sampler(10, Training(batch_size=4)), 5)
    assert sorted(indices[:10]) == list(range(10))
    assert sorted(indices[10:]) == list(range(10))
    assert indices[:10] != indices[10:]


def test_the_position_is_the_only_state():
    """A sampler that is set to a position continues like another one from there."""
    training = Training(batch_size=3, accumulation_steps=2)
    first, second = Sampler(10, training), Sampler(10, training)
    take(first, 7)
    second.position = first.position
    assert take(second, 5) == take(first, 5)


def test_a_seed_decides_the_order():
    """Equal seeds give the same order, and other seeds another."""
    orders = [take(Sampler(50, Training(batch_size=50, seed=seed)), 1) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_ranks_share_a_step_between_them():
    """Two ranks together draw what one device with twice the batch draws."""
    alone = take(Sampler(40, Training(batch_size=8)), 5)
    ranks = [Sampler(40, Training(batch_size=4), rank=rank, world_size=2) for rank in (0, 1)]
    together = [index for _ in range(5) for sampler in ranks for index in take(sampler, 1)]
    assert together == alone


def test_augmentation_is_seeded_by_the_place_in_the_run():
    """The same position draws the same augmentation, whatever was drawn before."""
    first, second = (Sampler(10, Training(batch_size=2)) for _ in range(2))
    [(_, generator)] = drawn(first)
    torch.rand(9, generator=generator)
    draws = [torch.rand(3, generator=g) for _, g in drawn(first)]
    second.position = 2
    assert torch.equal(draws[0], torch.rand(3, generator=next(drawn(second))[1]))


def test_too_large_a_batch_is_named_with_what_would_fit():
    """The error for too large a batch has all factors of a step's examples."""
    check_batch(Training(batch_size=10), 10, "digits")
    with pytest.raises(ConfigError, match=r"batch_size is 6 × 2 devices, .* choose at most 5"):
        check_batch(Training(batch_size=6), 10, "digits", world_size=2)
