"""Validation of data paths in a configuration, which a recipe reads."""

import os
from pathlib import Path
from tempfile import gettempdir

from halfstep.run_config import ConfigError

#: Variables set by the worker: folders that data paths must be below, and paths private to the
#: service.
ROOTS, PRIVATE = "HALFSTEP_DATA_ROOTS", "HALFSTEP_PRIVATE_PATHS"
#: They describe the machine and its processes, and contain no data.
SYSTEM = (Path("/proc"), Path("/sys"), Path("/dev"))


def data_path(named: str | Path, field: str) -> Path:
    """Return the resolved path of a file or folder in a configuration.

    field: its name there, e.g. recipe.text.  Raises ConfigError if reading it is not allowed.
    """
    try:
        place = Path(named).expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a loop of links, no such user
        raise ConfigError(f"{field} is {str(named)!r}: {error}") from error
    if place.is_relative_to(Path(gettempdir()).resolve()):  # temporary files of the run
        return place
    if any(place.is_relative_to(folder) for folder in (*SYSTEM, *_list_paths(PRIVATE))):
        raise ConfigError(
            f"{field} is {str(named)!r}: runs may not read it; not allowed: "
            f"{', '.join(map(str, SYSTEM))} and the folder of the service's own data"
        )
    roots = _list_paths(ROOTS)
    if roots and not any(place.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{field} is {str(named)!r}; allowed on this worker: below "
            f"{', '.join(map(str, roots))} ({ROOTS})"
        )
    return place


def _list_paths(variable: str) -> list[Path]:
    named = os.environ.get(variable, "").split(os.pathsep)
    return [Path(path).expanduser().resolve() for path in named if path]
