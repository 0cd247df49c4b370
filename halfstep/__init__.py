"""What a training script imports and a person types: watch, spool, recipe, client, command."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.answers import ApiError as ApiError
    from halfstep.client import Client as Client
    from halfstep.logged import Audio as Audio
    from halfstep.logged import Histogram as Histogram
    from halfstep.watching import Watch as Watch
    from halfstep.watching import watch as watch

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is: `import halfstep` costs nothing."""
    if name in ("ApiError", "Client"):
        from halfstep import client

        return getattr(client, name)
    if name in ("Audio", "Histogram"):
        from halfstep import logged

        return getattr(logged, name)
    if name in ("Watch", "watch"):
        from halfstep import watching

        return getattr(watching, name)
    if name in (
        "deepspeed",
        "keras",
        "lightning",
        "transformers",
        "ultralytics",
    ):  # the adapter, and with it the framework
        return importlib.import_module(f"halfstep.{name}")
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
