"""What a training script imports and a person types: spool, recipe, client, the command."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.client import ApiError as ApiError
    from halfstep.client import Client as Client

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the client when it is first asked for: `import halfstep` costs nothing."""
    if name in ("ApiError", "Client"):
        from halfstep import client

        return getattr(client, name)
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
