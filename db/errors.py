"""What can go wrong for a caller of this package; the server maps each class to a status code.

An exception's docstring is its message when none is given.
"""

from typing import ClassVar


class HalfstepError(Exception):
    """Something went wrong. code: what programs know it by, if not by the name of its class."""

    code: ClassVar[str] = ""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.__doc__)


class NotFound(HalfstepError):
    """There is no such thing."""


class InTrash(NotFound):
    """The run was deleted, and can be restored."""

    code = "not_found"


class Conflict(HalfstepError):
    """The run's status does not allow this."""


class Changed(Conflict):
    """Somebody else has changed it meanwhile."""


class Invalid(HalfstepError):
    """A value is not allowed.

    `errors` maps the path of each field ("training.batch_size") to what is wrong with it.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        self.errors = errors
        super().__init__("; ".join(f"{field}: {message}" for field, message in errors.items()))


class OverQuota(Invalid):
    """A project or a user would use more than they may."""


class InvalidCredentials(HalfstepError):
    """The name, password, link or token is not valid."""


class StaleAttempt(HalfstepError):
    """This attempt was given up: another one may be running, so nothing was written."""


class Ended(HalfstepError):
    """The run has ended, and takes nothing more."""


class NotOwner(HalfstepError):
    """The run is somebody else's: only its owner's tokens may send it."""


class OffsetMismatch(HalfstepError):
    """These bytes are not the next ones. offset, and of a spool sequence: where to go on."""

    code = "offset"

    def __init__(self, *, offset: int, sequence: int | None = None) -> None:
        self.offset, self.sequence = offset, sequence
        place = "" if sequence is None else f"sequence {sequence}, "
        super().__init__(f"These bytes are not the next ones: go on from {place}offset {offset}.")


class StorageUnreachable(HalfstepError):
    """The storage of checkpoints and artifacts does not answer. Try again."""


class StorageFull(HalfstepError):
    """The disk that stores files has no room; the message has the bytes needed and free."""


class DatabaseUnreachable(HalfstepError):
    """The database does not answer."""
