"""Classes of the service's commands: their expected errors end in one sentence."""

from typing import ClassVar

from db.errors import HalfstepError
from halfstep.cli.application import Command, ServingCommand, single


class ServiceCommand(Command):
    """A command of the service."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (HalfstepError,)


class ServerCommand(ServingCommand):
    """A command that serves until it is stopped, of which only settings may be wrong."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (HalfstepError,)


command = single(ServiceCommand)
server_command = single(ServerCommand)
