"""The computed order of examples: a random-looking permutation of any size, at any position."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import CHUNK, Order, permute

SIZES = st.integers(1, 3000) | st.integers(1, 60).map(lambda n: n * n)
TEN_MILLION = 10_000_000
SIZE = CHUNK + 1000
WHOLE = Order(SIZE, 1, shuffle=True).take(0, 8 * SIZE)


@given(size=SIZES, seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
def test_every_example_has_one_place_in_an_epoch(size, seed, epoch):
    """An epoch has every example once, for any size."""
    order = Order(size, seed, shuffle=True).take(epoch * size, size)
    assert sorted(order.tolist()) == list(range(size))


@given(start=st.integers(0, 4 * CHUNK), count=st.integers(1, 3 * CHUNK))
def test_a_slice_equals_the_slice_of_the_whole(start, count):
    """A slice of the order equals the same slice of the whole, across chunks and epochs."""
    order = Order(SIZE, 1, shuffle=True)
    assert order.take(start, count).equal(WHOLE[start : start + count])
    assert order.take(start // 2, count).equal(WHOLE[start // 2 : start // 2 + count])


@pytest.mark.slow
def test_all_orders_of_a_few_examples_are_about_as_likely():
    """All 24 orders of four examples are about equally likely, by chi-square over seeds."""
    seeds, size = 1500, 4
    found = Counter(
        tuple(Order(size, s, shuffle=True).take(0, size).tolist()) for s in range(seeds)
    )
    expected = seeds / math.factorial(size)
    assert len(found) == math.factorial(size)
    assert sum((n - expected) ** 2 / expected for n in found.values()) < 60  # 23 are expected


def test_neighbours_are_strangers():
    """Neighbours in an order of ten million examples, and positions in two epochs, look random."""
    first, second = (
        Order(TEN_MILLION, 5, shuffle=True).take(epoch * TEN_MILLION + 9_000_000, CHUNK).numpy()
        for epoch in (0, 1)
    )
    third = TEN_MILLION / 3  # the mean distance of two places drawn at random
    for one, other in ((first[1:], first[:-1]), (first, second)):
        assert abs(np.abs(one - other).mean() / third - 1) < 0.03
    assert abs(first.mean() / (TEN_MILLION / 2) - 1) < 0.03
    tenths = np.bincount(first // (TEN_MILLION // 10), minlength=10) / (CHUNK / 10)
    assert np.abs(tenths - 1).max() < 0.12


def test_without_shuffling_they_come_as_they_are():
    """Without shuffling, examples keep their order in each epoch."""
    indices = Order(5, 0, shuffle=False).take(3, 9).tolist()
    assert indices == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_places_of_a_size_beyond_memory_are_computed():
    """Positions in an order of 2^40 examples, larger than memory, are computed."""
    size = 2**40
    places = np.arange(size - 1000, size, dtype=np.uint64)
    found = permute(places, size, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found.max() < size
    assert len(set(found.tolist())) == 1000
    assert not any(abs(int(a) - int(b)) == 1 for a, b in pairwise(found))
