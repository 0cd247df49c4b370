"""What can go wrong for a caller of this package; the server maps each class to a status code.

An exception's docstring is its message when none is given.
"""


class HalfstepError(Exception):
    """Something went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.__doc__)


class NotFound(HalfstepError):
    """There is no such thing."""


class Conflict(HalfstepError):
    """The run's status does not allow this."""


class Invalid(HalfstepError):
    """A value is not allowed.

    `errors` maps the path of each field ("training.batch_size") to what is wrong with it.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        self.errors = errors
        super().__init__("; ".join(f"{field}: {message}" for field, message in errors.items()))


class Refused(HalfstepError):
    """The name, password, link or token is not valid."""


class Fenced(HalfstepError):
    """This attempt was given up: another one may be running, so nothing was written."""


class StorageUnreachable(HalfstepError):
    """The storage of checkpoints and artifacts does not answer. Try again."""


class DatabaseUnreachable(HalfstepError):
    """The database does not answer."""
