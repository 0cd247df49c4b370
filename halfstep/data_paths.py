"""The paths that people may name in a configuration, for a recipe to read."""

import os
from pathlib import Path
from tempfile import gettempdir

from halfstep.run_config import ConfigError

#: Which folders it has to lie below, and what is private to the service; the worker tells both.
ROOTS, PRIVATE = "HALFSTEP_DATA_ROOTS", "HALFSTEP_PRIVATE_PATHS"
#: They tell of the machine and its processes, and are nobody's data.
SYSTEM = (Path("/proc"), Path("/sys"), Path("/dev"))


def data_path(named: str | Path, field: str) -> Path:
    """Return where a file or folder lies that a configuration names, its links followed.

    field: as it is called there, recipe.text.  Raises ConfigError if it is not to be read.
    """
    try:
        place = Path(named).expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a loop of links, nobody's home
        raise ConfigError(f"{field} is {str(named)!r}: {error}") from error
    if place.is_relative_to(Path(gettempdir()).resolve()):  # of a run its own
        return place
    if any(place.is_relative_to(each) for each in (*SYSTEM, *_listed(PRIVATE))):
        raise ConfigError(
            f"{field} is {str(named)!r}: what lies there is not for runs to read; not allowed: "
            f"{', '.join(map(str, SYSTEM))} and the folder of the service's own data"
        )
    roots = _listed(ROOTS)
    if roots and not any(place.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{field} is {str(named)!r}; allowed on this worker: below "
            f"{', '.join(map(str, roots))} ({ROOTS})"
        )
    return place


def _listed(variable: str) -> list[Path]:
    named = os.environ.get(variable, "").split(os.pathsep)
    return [Path(each).expanduser().resolve() for each in named if each]
