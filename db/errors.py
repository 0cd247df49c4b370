"""Exceptions of this package; the server maps each class to a status code.

An exception's docstring is its default message.
"""

from typing import ClassVar, Self

from halfstep import field_errors


class HalfstepError(Exception):
    """An error occurred."""

    code: ClassVar[str] = ""  # in responses; empty: derived from the name of the class

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.__doc__)


class NotFound(HalfstepError):
    """The object does not exist."""


class InTrash(NotFound):
    """The run was deleted, and can be restored."""

    code = "not_found"


class Conflict(HalfstepError):
    """The run's status does not allow this."""


class Changed(Conflict):
    """Another user has changed this in the meantime."""


class Invalid(HalfstepError):
    """A value is not allowed.

    `errors` maps the path of each field ("training.batch_size") to its error message. Of many, or
    long ones, only a part is reported.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        self.errors = field_errors.bound(errors)
        super().__init__(field_errors.summary(self.errors))


class OverQuota(Invalid):
    """A quota of the project or the user would be exceeded."""


class InvalidCredentials(HalfstepError):
    """The name, password, link or token is not valid."""


class StaleAttempt(HalfstepError):
    """This attempt is no longer the current one: another may be running. Nothing was written."""


class Ended(HalfstepError):
    """The run has ended and accepts no more data."""


class NotOwner(HalfstepError):
    """The run belongs to another user: only its owner's tokens may upload it."""


class OffsetMismatch(HalfstepError):
    """These bytes are not the next ones."""

    code = "offset"

    def __init__(self, *, offset: int, sequence: int | None = None) -> None:
        """offset, and for a spool sequence: the expected position."""
        self.offset, self.sequence = offset, sequence
        position = "" if sequence is None else f"sequence {sequence}, "
        text = (
            f"These bytes do not follow the stored ones: continue from {position}offset {offset}."
        )
        super().__init__(text)


class StorageUnreachable(HalfstepError):
    """The storage of checkpoints and artifacts does not answer. Try again."""


class StepsUnreadable(HalfstepError):
    """The file with the steps of a run that has ended is missing or damaged."""

    @classmethod
    def of(cls, key: str, problem: str) -> Self:
        """Return the error of a file."""
        return cls(
            f"The steps of a run that has ended are in {key}, which cannot be read: {problem}. "
            "Restore this file from a backup. Without one, `halfstep storage check --deep "
            "--mend` deletes its record: the run's charts remain, without single steps."
        )


class StepsNotConverted(HalfstepError):
    """The steps or metrics of a run are still in the form of an earlier version."""

    def __init__(self, run_id: int) -> None:
        self.run_id = run_id
        super().__init__(
            f"The data of run {run_id} is being converted after an upgrade. Try again in a "
            "minute, or when its training has ended if an earlier version still records it."
        )


class StepsMissing(HalfstepError):
    """The database has only some of the steps of a run, as after a lost file."""

    @classmethod
    def of(cls, steps: int, expected: int) -> Self:
        """Return the error of a run with so many steps, of which its summaries count more."""
        return cls(
            f"{steps:,} of its {expected:,} steps are left, as after `halfstep storage check "
            "--mend` with a file missing. They stay in the database; restore a backup for the rest."
        )


class StorageFull(HalfstepError):
    """The disk that stores files is full."""


class DatabaseUnreachable(HalfstepError):
    """The database does not answer."""
