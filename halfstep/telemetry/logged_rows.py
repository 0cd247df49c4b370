"""Step rows from logged numbers: of scripts whose optimizer steps are not observed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from halfstep.importing.columns import columns_of
from halfstep.telemetry.flags import NONFINITE_LOSS, UNKNOWN_NORM
from halfstep.telemetry.spool import STEP_DTYPE, UNKNOWN_US, Steps

COLUMNS = ("loss", "scale", "grad_norm", "lr")
LARGEST_US = 2**31 - 1


class LoggedRow(NamedTuple):
    """The numbers of a step that its row can hold."""

    step: int
    elapsed_ms: int
    numbers: Mapping[str, float]  # by name
    columns: Mapping[str, str]  # columns of the row, by name

    @property
    def loss(self) -> float:
        """The step's loss."""
        return next(self.numbers[name] for name, column in self.columns.items() if column == "loss")

    @classmethod
    def of(cls, step: int, elapsed_ms: int, numbers: Mapping[str, float]) -> "LoggedRow | None":
        """Return the row of a step; None without a loss, and before the first step."""
        columns = {
            name: column for name, column in columns_of(numbers).items() if column in COLUMNS
        }
        if step < 1 or "loss" not in columns.values():
            return None
        return cls(step, elapsed_ms, {name: numbers[name] for name in columns}, columns)


def rows_of(logged: Sequence[LoggedRow], before: tuple[int, int] | None = None) -> Steps:
    """Return the rows as STEP_DTYPE records.

    before: step and elapsed_ms of the row before the first, from which its duration is known.
    """
    rows = np.zeros(len(logged), STEP_DTYPE)
    rows["scale"], rows["data_us"] = 1.0, UNKNOWN_US
    rows["grad_norm"] = rows["lr"] = np.nan
    with np.errstate(over="ignore"):  # beyond float32: infinite
        for row, entry in zip(rows, logged, strict=True):
            row["step"], row["elapsed_ms"] = entry.step, entry.elapsed_ms
            for name, column in entry.columns.items():
                row[column] = entry.numbers[name]
            if before is not None:
                steps, milliseconds = max(entry.step - before[0], 1), entry.elapsed_ms - before[1]
                row["step_us"] = min(max(milliseconds * 1000 // steps, 0), LARGEST_US)
            before = entry.step, entry.elapsed_ms
    rows["grad_norm_clipped"] = rows["grad_norm"]
    rows["flags"] = np.where(np.isfinite(rows["loss"]), 0, NONFINITE_LOSS)
    has_norm = ["grad_norm" in entry.columns.values() for entry in logged]
    rows["flags"] |= np.where(has_norm, 0, UNKNOWN_NORM).astype(np.uint32)
    return rows
