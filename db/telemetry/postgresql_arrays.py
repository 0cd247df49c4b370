"""NumPy arrays as parameters of PostgreSQL, on connections that are opened after the import."""

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.adapt import Dumper
from psycopg.pq import Format


class ArrayDumper(Dumper):
    """Dumper of numbers as a binary PostgreSQL array, without a Python object per number."""

    format = Format.BINARY

    def dump(self, array: NDArray[np.generic]) -> bytes:
        """Return the array in the binary format."""
        oid, kind = (701, ">f8") if array.dtype.kind == "f" else (20, ">i8")
        items = np.empty(len(array), dtype=[("size_bytes", ">i4"), ("value", kind)])
        items["size_bytes"], items["value"] = 8, array
        # Dimensions (1), NULLs (0), element type, length, lower bound (1).
        return np.array([1, 0, oid, len(array), 1], dtype=">i4").tobytes() + items.tobytes()


psycopg.adapters.register_dumper(np.ndarray, ArrayDumper)
