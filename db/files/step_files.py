"""Parquet files in which earlier versions stored the steps of ended runs; only read, to convert.

Versions before 0.4.0 read them. Integers are DELTA_BINARY_PACKED, floats BYTE_STREAM_SPLIT.
lr_bits are the bits of lr as an integer. A null is a NaN.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import obstore
from numpy.typing import NDArray
from obstore.store import ObjectStore

from db.errors import StepsUnreadable, StorageUnreachable
from db.tables import FrozenSteps

#: Folder of the files in the store.
STEPS = "steps"
WHOLE = ("step", "elapsed_ms", "step_us", "flags")
NAMES = (
    *("step", "elapsed_ms", "loss", "scale", "grad_norm", "grad_norm_clipped"),
    *("lr", "step_us", "data_us", "flags"),
)
LR_BITS = "lr_bits"
NAN_BITS = int(np.float64(np.nan).view(np.int64))

#: Opens the store; called once, with the first file.
OpenStore = Callable[[], ObjectStore]


class StepFile:
    """A local copy of a file."""

    def __init__(self, key: str, copy: IO[bytes]) -> None:
        self.key, self.copy = key, copy

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and last step of each row group. Raises StepsUnreadable."""
        with self._errors_named(), self._open() as file:
            groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
            spans = [group.column(0).statistics for group in groups]
            return [(span.min, span.max) for span in spans]

    def read(self, group: int) -> dict[str, NDArray[Any]]:
        """Return the columns of a row group. Raises StepsUnreadable."""
        stored = [LR_BITS if name == "lr" else name for name in NAMES]
        with self._errors_named(), self._open() as file:
            table = file.read_row_group(group, columns=stored, use_threads=False)
            return {
                name: _numbers(name, table[column])
                for name, column in zip(NAMES, stored, strict=True)
            }

    def _open(self) -> Any:
        from pyarrow import parquet  # deferred: uses 30 MiB

        return parquet.ParquetFile(self.copy, page_checksum_verification=True)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        from pyarrow import ArrowException

        try:
            yield
        except (OSError, ArrowException) as error:
            problem = str(error)[:200].partition("\n")[0]
            raise StepsUnreadable.of(self.key, problem) from error


@contextmanager
def copy_steps(open_store: OpenStore | None, row: FrozenSteps, *, lost: bool) -> Iterator[StepFile]:
    """Copy a file and check its SHA-256, unless `lost`: it may be damaged or missing.

    Raises StepsUnreadable, StorageUnreachable.
    """
    if open_store is None:
        raise StepsUnreadable.of(row.key, "this program has not opened the store")
    digest = sha256()
    with TemporaryFile() as copy:
        try:
            for chunk in obstore.get(open_store(), row.key):
                copy.write(chunk)
                digest.update(chunk)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StorageUnreachable from error
            check_has_steps(open_store())
            if not lost:
                raise StepsUnreadable.of(row.key, "the file is missing") from error
        except (OSError, obstore.exceptions.BaseError) as error:
            raise StorageUnreachable from error
        if digest.hexdigest() != row.sha256 and not lost:
            raise StepsUnreadable.of(row.key, "its SHA-256 differs from the recorded one")
        copy.flush()
        yield StepFile(row.key, copy)


def check_has_steps(store: ObjectStore) -> None:
    """Check that the store has files of steps: some are recorded. Raises StorageUnreachable.

    Otherwise no file is lost: a disk is not mounted, or it is another store.
    """
    try:
        file = next(iter(obstore.list(store, prefix=STEPS)), None)
    except (OSError, obstore.exceptions.BaseError) as error:
        raise StorageUnreachable from error
    if not file:
        raise StorageUnreachable(
            f"The storage has no file in the folder {STEPS!r}, with the steps of runs that have "
            "ended: mount it, or let HALFSTEP_DATA or HALFSTEP_STORAGE_URL name the storage."
        )


def delete(open_store: OpenStore, keys: list[str]) -> None:
    """Delete files; what does not exist, or cannot be deleted, is left to `storage check`."""
    for key in keys:
        with suppress(OSError, obstore.exceptions.BaseError):
            obstore.delete(open_store(), key)


def _numbers(name: str, column: Any) -> NDArray[np.generic]:
    values: NDArray[np.generic]
    if name == "lr":
        values = column.fill_null(NAN_BITS).to_numpy()
        return values.view(np.float64)
    values = column.to_numpy()
    return values.astype(np.int64 if name in WHOLE else np.float64, copy=False)
