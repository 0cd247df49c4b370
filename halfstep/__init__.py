"""What a training script imports and a person types: watch, spool, recipe, client, command."""

import importlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.answers import ApiError as ApiError
    from halfstep.client import Client as Client
    from halfstep.logged import Audio as Audio
    from halfstep.logged import Histogram as Histogram
    from halfstep.watching import Watch as Watch
    from halfstep.watching import watch as watch

__version__ = "0.1.0"

#: Ours, and while a run of the drop-in's is active its own.
SHARED = ("Audio", "Histogram", "watch")
#: Of `import halfstep as wandb`, see halfstep.dropin.
DROP_IN = frozenset(
    [
        "Image",
        "Table",
        "alert",
        "config",
        "define_metric",
        "finish",
        "init",
        "log",
        "run",
        "save",
        "summary",
    ]
)
#: Of frameworks.
ADAPTERS = ("deepspeed", "keras", "lightning", "transformers", "ultralytics")


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is: `import halfstep` costs nothing."""
    if name in ("ApiError", "Client"):
        from halfstep import client

        return getattr(client, name)
    if name in DROP_IN or (name in SHARED and "halfstep.dropin.calls" in sys.modules):
        from halfstep.dropin import calls

        return calls.served(name)
    if name in ("Audio", "Histogram"):
        from halfstep import logged

        return getattr(logged, name)
    if name in ("Watch", "watch"):
        from halfstep import watching

        return getattr(watching, name)
    if name in ADAPTERS:  # and with it the framework
        return importlib.import_module(f"halfstep.{name}")
    if not name.startswith("_"):
        from halfstep.dropin.unserved import ERRORS, UNSERVED, Unserved

        if name in ERRORS:
            return ERRORS[name]
        if name == "errors":
            return SimpleNamespace(**ERRORS)
        if name in UNSERVED:
            return Unserved(name)
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
