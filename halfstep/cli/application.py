"""Typer classes of all commands: errors are sentences, and simple values need no pydantic."""

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from halfstep import protocol
from halfstep.api_client.credentials import Unreadable
from halfstep.api_client.errors import ApiError, DamagedData
from halfstep.artifacts.names import ArtifactError
from halfstep.cli.output import warn
from halfstep.suggestions import did_you_mean
from halfstep.telemetry.plain_json import is_unicode

F = TypeVar("F", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose expected errors end in one sentence on stderr and exit code 1."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (
        ApiError,
        ArtifactError,
        Unreadable,
    )

    #: Whether errors of files end in a sentence too; else in a traceback.
    has_file_errors: ClassVar[bool] = True

    def __init__(self, name: str | None, *, help: str | None = None, **settings: Any) -> None:  # noqa: A002 - typer's name
        super().__init__(name, help=_paragraphs(help), **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help among them."""
        return _without_pydantic(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and reject bytes that are not UTF-8; a path may have them."""
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str) and not is_unicode(text):
                    message = f"{os.fsencode(text)!r} is not valid; allowed: UTF-8"
                    raise typer.BadParameter(message, ctx=ctx, param=parameter)  # type: ignore[arg-type]
        return rest

    def invoke(self, ctx: Any) -> object:
        """Run the command; expected errors and those of files become a sentence."""
        files = _file_errors() if self.has_file_errors else nullcontext()
        with files, warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            try:
                return super().invoke(ctx)
            except self.expected_errors as error:
                sys.exit(f"halfstep: {error}")
            except KeyError as error:
                if not protocol.LastServer.is_older:
                    raise
                sys.exit(f"halfstep: the response has no {error}. {protocol.OLDER_SERVER}")


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], *place: object
) -> None:
    """Print a warning of damaged data as a sentence, and another one as Python does."""
    if issubclass(category, DamagedData):
        warn(str(message))
    else:
        show(message, category, *place)


class ServingCommand(Command):
    """A command that serves until it is ended: of errors the traceback says more."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = ()
    has_file_errors = False


class Group(TyperGroup):
    """A group of commands; an unknown name lists those that exist."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help among them."""
        return _without_pydantic(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            guess = did_you_mean(name, known)
            ctx.fail(f"there is no command {name!r}; {guess}allowed: {', '.join(known)}")
        return super().resolve_command(ctx, args)


class ListingGroup(Group):
    """A group whose command `list` may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with `list` first where no command is."""
        is_left_out = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        return super().parse_args(ctx, ["list", *args] if is_left_out else args)


class PassThrough(Command):
    """A command that parses its arguments itself: a callable that takes them as a list."""

    def __init__(self, name: str, run: Callable[[list[str]], Any], help: str) -> None:  # noqa: A002 - typer's name
        super().__init__(name, help=help, add_help_option=False)
        self._run = run

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep all arguments unparsed."""
        ctx.args = list(args)
        return []

    def invoke(self, ctx: Any) -> Any:
        """Call the callable, which handles its own errors."""
        self._run(ctx.args)


class App(typer.Typer):
    """A Typer application whose commands and groups are of the classes above."""

    def __init__(
        self,
        help: str = "",  # noqa: A002 - typer's name
        *,
        cls: type[Command] = Command,
        group: type[TyperGroup] = Group,
    ) -> None:
        super().__init__(
            cls=group,
            help=help,
            add_completion=False,
            pretty_exceptions_enable=False,
            no_args_is_help=True,
        )
        self._command_class = cls

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Add a command, as typer.Typer.command does."""
        return super().command(name, **({"cls": self._command_class} | settings))


def single(cls: type[Command] = Command, **settings: Any) -> Callable[[Callable[..., None]], App]:
    """Return a decorator that makes a function an application of one command.

    settings: of typer.Typer.command.
    """

    def decorate(function: Callable[..., None]) -> App:
        app = App(cls=cls)
        app.command(function.__name__.strip("_").replace("_", "-"), **settings)(function)
        return app

    return decorate


def message_of(error: typer.TyperException) -> str:
    """Return the message of a usage error: `--limit: 'x' is not a whole number`."""
    parameter = getattr(error, "param", None)
    is_missing = type(error).__name__ == "MissingParameter"
    if isinstance(error, typer.BadParameter) and not is_missing:
        hint = parameter.get_error_hint().replace("'", "") if parameter is not None else ""
        return f"{hint}: {error.message}" if hint else error.message
    if is_missing and parameter is not None:
        return f"{parameter.get_error_hint().replace(chr(39), '')} is missing"
    text = error.format_message()
    return text[:1].lower() + text[1:].rstrip(".")


@contextmanager
def _file_errors() -> Iterator[None]:
    """End with a sentence that names the file that cannot be read or written, and why."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # while an error can still be reported
    except BrokenPipeError:  # `halfstep run log 1 | head`: the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # the error has no name of the file
        name = error.filename or ("output" if is_full else None)
        sys.exit(f"halfstep: {f'{name}: ' if name else ''}{error.strerror or error}")


def _without_pydantic(parameters: list[Any]) -> list[object]:
    """Give parameters of simple types a converter without pydantic, and return all.

    typer's own converters load pydantic, 80 ms of each command, and word their errors for
    programmers. A version of typer without these attributes converts as ever.
    """
    for parameter in parameters:
        description = getattr(parameter, "type_descriptor", None)
        if description is None or getattr(parameter, "_runtime_param", None) is not None:
            continue
        annotation, settings = description.annotation, description.parameter_info
        item = get_args(annotation)[0] if get_origin(annotation) is list else annotation
        is_plain_path = item is Path and not (settings.exists or settings.resolve_path)
        is_simple = item in (str, int, float, bool) or get_origin(item) is Literal or is_plain_path
        if is_simple and settings.parser is None:
            parameter._runtime_param = _Converter(item, settings.min, settings.max)
    return parameters


class _Converter:
    """Replacement for typer's RuntimeParam."""

    def __init__(self, kind: Any, least: float | None, most: float | None) -> None:
        self._kind, self._least, self._most = kind, least, most

    def coerce(self, value: Any, param: Any, ctx: Any) -> object:
        """Convert the argument, or pass on a default, which already has its type."""
        is_many = param.multiple or param.nargs == -1
        if value is None:
            return () if is_many else None
        try:
            return [self._one(item) for item in value] if is_many else self._one(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from error

    def _one(self, value: Any) -> object:
        if not isinstance(value, str):
            return value
        if get_origin(self._kind) is Literal:
            allowed = get_args(self._kind)
            if value not in allowed:
                raise ValueError(f"{value!r} is not valid; allowed: {', '.join(allowed)}")
            return value
        if self._kind in (int, float):
            return self._number(value)
        return value if self._kind is str else self._kind(value)

    def _number(self, text: str) -> float:
        noun = "a whole number" if self._kind is int else "a number"
        try:
            number: float = self._kind(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not {noun}") from error
        low, high = self._least, self._most
        if (low is not None and not number >= low) or (high is not None and not number <= high):
            bounds = f"{low} to {high}" if None not in (low, high) else f"at least {low}"
            raise ValueError(f"{text} is not valid; allowed: {bounds}")
        return number


def _paragraphs(text: str | None) -> str | None:
    """Return a docstring with a line per paragraph, to be broken by the width of the terminal."""
    if text is None:
        return None
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def first_line(text: str | None) -> str:
    """Return the first line of a docstring."""
    return str(text or "").strip().partition("\n")[0]
