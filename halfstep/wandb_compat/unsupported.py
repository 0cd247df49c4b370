"""Unsupported features of W&B: reported once on stderr, never by an exception."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from halfstep.session.stderr import Messages, say
from halfstep.telemetry.plain_json import JsonObject

#: Names in wandb that do nothing here.
UNSERVED = (
    "Api",
    "ArtifactTTL",
    "Bokeh",
    "Classes",
    "Graph",
    "JoinedTable",
    "Molecule",
    "Run",
    "Settings",
    "apis",
    "attach",
    "beta",
    "box3d",
    "catboost",
    "controller",
    "data_types",
    "env",
    "gym",
    "integration",
    "join",
    "lightgbm",
    "link_artifact",
    "link_model",
    "login",
    "mark_preempting",
    "plot_table",
    "plots",
    "require",
    "restore",
    "sdk",
    "setup",
    "sklearn",
    "teardown",
    "tensorboard",
    "termerror",
    "termlog",
    "termsetup",
    "termwarn",
    "unwatch",
    "util",
    "xgboost",
)
#: What to do instead of a call.
INSTEAD = {"login": ": `halfstep login URL` in a shell stores a server's address and token"}
imported_as = "wandb"  # the name under which the script has imported this package
_messages = Messages(lambda text: say(f"as {imported_as}: {text}"))

P = ParamSpec("P")
R = TypeVar("R")


class Error(Exception):
    """W&B's error class, which `use_artifact` and `sweep` raise."""


#: Names of that class in `wandb`.
ERRORS = dict.fromkeys(("CommError", "Error", "UsageError"), Error)


class Unserved:
    """Placeholder that accepts any operation and does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> "Unserved":  # noqa: D102
        say_once(f"{self._name} is not supported and does nothing{INSTEAD.get(self._name, '')}")
        return self

    def __getattr__(self, name: str) -> "Unserved":
        if name.startswith("__"):
            raise AttributeError(name)
        return Unserved(f"{self._name}.{name}")

    def __enter__(self) -> "Unserved":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getitem__(self, key: Any) -> "Unserved":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def say_once(text: str) -> None:
    """Print a message the first time it occurs, and a few of each kind."""
    _messages.say_once(text)


def report_exceptions(method: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function to report exceptions instead of raising them in a user's script."""

    @wraps(method)
    def wrapper(*arguments: P.args, **named: P.kwargs) -> R | None:
        try:
            return method(*arguments, **named)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            say_once(f"{method.__name__}() failed and is ignored: {text}")
            return None

    return wrapper


def report_ignored(function: str, given: JsonObject) -> None:
    """Report arguments that were given but have no effect."""
    for name, value in given.items():
        if value not in (None, False, (), [], {}):
            say_once(f"{function}({name}=…) is not supported and is ignored")
