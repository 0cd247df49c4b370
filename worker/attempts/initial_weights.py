"""Initial weights of a run: the operator's, uploaded ones, or another run's."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from db.files import uploads
from db.files.object_store import get_file
from db.settings import Settings
from db.tables import CheckpointFile
from halfstep.data_paths import SYSTEM
from halfstep.telemetry.plain_json import JsonObject
from worker.attempts.attempt import Attempt, CannotStart
from worker.attempts.renew_lease import wait_for


def get_weights_group(config: JsonObject) -> dict[str, Any]:
    """Return a configuration's "weights" group; {} in one of an earlier version."""
    group: dict[str, object] = config.get("weights", {})
    return group


def bring_weights(attempt: Attempt, saved: Sequence[CheckpointFile]) -> dict[str, str]:
    """Return local paths of the weights by module, with "" for all modules.

    saved: files of another run, if its weights are used.  Raises CannotStart.
    """
    names = get_weights_group(attempt.run.settings)
    if names.get("path"):
        return {"": str(resolve(names["path"], attempt.settings))}
    if upload := names.get("upload"):
        sha256, _, name = upload.partition("/")
        return {"": _fetch(attempt, uploads.key(upload), sha256, f"the uploaded weights {name}")}
    if not names.get("run"):
        return {}
    source = f"the weights of run {names['run']} at step {names['step']}"
    if not saved:
        raise CannotStart(f"{source} no longer exist", "settings")
    return {
        row.kind.partition(".")[2]: _fetch(attempt, row.key, row.sha256, source) for row in saved
    }


def resolve(path: str, settings: Settings) -> Path:
    """Return the resolved path of weights named by path. Raises CannotStart.

    For a path outside the allowed folders the error does not reveal whether it exists.
    """
    folders = settings.weights_folders
    if not folders:
        raise CannotStart(
            f"weights.path is {path}, but this worker allows no folders; set HALFSTEP_WEIGHTS_DIRS "
            "on the worker",
            "settings",
        )
    try:
        place = Path(path).resolve()  # follows links, so that none leads outside
        is_inside = any(place.is_relative_to(folder) for folder in folders)
        exists = is_inside and place.exists()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a NUL, a name too long, a link loop
        raise CannotStart(f"weights.path is {path!r}: {error}", "settings") from error
    if any(place.is_relative_to(folder) for folder in SYSTEM):
        text = f"weights.path is {path}; not allowed: {', '.join(map(str, SYSTEM))}"
        raise CannotStart(text, "settings")
    if not is_inside:
        places = ", ".join(map(str, folders))
        raise CannotStart(f"weights.path is {path}; allowed: paths below {places}", "settings")
    if not exists:
        raise CannotStart(
            f"weights.path is {path}, which does not exist on this worker", "settings"
        )
    return place


def _fetch(attempt: Attempt, key: str, sha256: str, source: str) -> str:
    path = attempt.settings.data / key
    try:
        wait_for(partial(get_file, attempt.store, key, path, sha256=sha256), attempt.renew_lease)
    except (FileNotFoundError, ValueError) as error:
        text = f"{source} that it was to start from are missing or damaged: {error}"
        raise CannotStart(text, "settings") from error
    return str(path)
