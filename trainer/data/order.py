"""The order of examples, computed on demand without a list per epoch.

An epoch's order is a Feistel network, which is a permutation: a position is a cell of a grid with
hardly more cells than examples; its column and its row are shifted alternately, each by a hash of
the other; a result outside of the range goes through the network again until it is inside ("cycle
walking"). So the ten-millionth example costs as much as the first.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 2**14  # positions computed at once: 2 ms, and 128 KiB
ROUNDS = 12

Places = NDArray[np.uint64]


class Order:
    """An endless stream of indices: the order of epoch 0, then that of epoch 1, and so on.

    It caches the last chunk, so each reader needs its own object.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool, pin: bool = False) -> None:
        self._size, self._seed, self._shuffle, self._pin = size, seed, shuffle, pin
        self._kept = (-1, -1)
        self._chunk = torch.empty(0, dtype=torch.int64)

    def take(self, start: int, count: int) -> Tensor:
        """Return the indices (count,) at these positions, int64 on the host; pinned if `pin`."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self._size)
            number, first = divmod(offset, CHUNK)
            part = self._of(epoch, number)[first : first + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        if len(parts) == 1:
            return parts[0]
        joined = torch.cat(parts)
        return joined.pin_memory() if self._pin else joined

    def _of(self, epoch: int, number: int) -> Tensor:
        if self._kept != (epoch, number):
            first = number * CHUNK
            places = np.arange(first, min(first + CHUNK, self._size), dtype=np.uint64)
            if self._shuffle:
                places = permute(places, self._size, _keys(self._seed, epoch))
            chunk = torch.from_numpy(places.astype(np.int64))
            self._chunk = chunk.pin_memory() if self._pin else chunk
            self._kept = epoch, number
        return self._chunk


def permute(places: Places, size: int, keys: Sequence[int]) -> Places:
    """Return the images of positions under a permutation of 0 … size − 1. keys: one per round."""
    columns = math.isqrt(size - 1) + 1
    columns += columns % 2  # with an odd number, shifts of columns would only be even permutations
    rows = -(-size // columns)
    result = _through(places, columns, rows, keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _through(result[outside], columns, rows, keys)
    return result


def _through(places: Places, columns: int, rows: int, keys: Sequence[int]) -> Places:
    """Apply the network once, on the grid."""
    row, column = np.divmod(places, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2:
            _move(row, _hash(column, key), rows)
        else:
            _move(column, _hash(row, key), columns)
    row *= np.uint64(columns)
    row += column
    return row


def _move(places: Places, by: Places, size: int) -> None:
    """Add `by`, 64 bits scaled to 0 … size − 1, to the positions, in place and modulo size."""
    by >>= np.uint64(32)  # avoids a division
    by *= np.uint64(size)
    by >>= np.uint64(32)
    places += by
    places -= (places >= size) * np.uint64(size)


def _hash(values: Places, key: int) -> Places:
    """Return 64 mixed bits of each value. Source: Steele et al., "SplitMix", OOPSLA 2014."""
    mixed = values + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _keys(seed: int, epoch: int) -> list[int]:
    key = b"order %d %d" % (seed, epoch)
    digests = (hashlib.blake2b(key, digest_size=8, salt=bytes([n])) for n in range(ROUNDS))
    return [int.from_bytes(digest.digest(), "little") for digest in digests]
