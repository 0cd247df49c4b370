"""Bits of a step's flags, the only definition in Python; charts/points.js has those it reads."""

from enum import IntFlag


class StepFlag(IntFlag):
    """A bit of the column `flags` of a step's record, in the spool and in the database."""

    SKIPPED = 1  # by the scaler, in any optimizer
    NONFINITE_LOSS = 2
    NORM_OVERFLOW = 4  # gradients are finite, and their L2 norm exceeds float32
    NOT_STEPPED = 8  # the scaler was updated without an optimizer step: neither applied nor skipped
    UNKNOWN_LOSS = 16  # no backward pass of the step was observed: its NaN is not a loss
    UNKNOWN_NORM = 32  # no gradient was observed: its NaN is not a norm


# Plain integers: numpy would convert an IntFlag to int64, and `&` of two is 20 times as slow.
SKIPPED = StepFlag.SKIPPED.value
NONFINITE_LOSS = StepFlag.NONFINITE_LOSS.value
NORM_OVERFLOW = StepFlag.NORM_OVERFLOW.value
NOT_STEPPED = StepFlag.NOT_STEPPED.value
UNKNOWN_LOSS = StepFlag.UNKNOWN_LOSS.value
UNKNOWN_NORM = StepFlag.UNKNOWN_NORM.value
#: Optimizers with a bit of their own, from bit 8 on: those skipped in the step.
FLAGGED_OPTIMIZERS = 24


def optimizer_skipped(index: int) -> int:
    """Return the skip flag of an optimizer, by index from 0; 0 if the flags lack a bit for it."""
    return 1 << (8 + index) if index < FLAGGED_OPTIMIZERS else 0
