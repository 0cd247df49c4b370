"""Artifacts of a recipe: texts, images and tables of an evaluation or a step.

<run folder>/artifacts/step-00000400/<name>
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from halfstep.recipe import RecipeError
from halfstep.session import logged_values
from halfstep.telemetry.events import Artifact, Event
from trainer.checkpoints.files import write_whole

#: A name with a suffix, without a folder, that does not begin with a dot.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.[A-Za-z0-9]{1,16}")


def files_of(values: Mapping[str, object]) -> dict[str, bytes]:
    """Convert logged values to files by name.

    Bytes, and texts whose name has a suffix, are file contents. Raises RecipeError for unsupported
    values.
    """
    files = {}
    for name, value in values.items():
        if isinstance(value, bytes):
            files[name] = value
        elif isinstance(value, str) and NAME.fullmatch(name):
            files[name] = value.encode()
        else:
            try:
                files.update(logged_values.files_of(name, value))
            except (TypeError, ValueError) as error:
                raise RecipeError(f'"{name}" cannot be saved: {error}') from error
    return files


def check_names(artifacts: Mapping[str, bytes]) -> None:
    """Raise RecipeError for a name that is not a plain file name."""
    for name in artifacts:
        if not NAME.fullmatch(name):
            raise RecipeError(
                f"an artifact is named {name!r}; allowed: letters, digits, '.', '_' and '-', with "
                'a suffix and no folder, such as "samples.txt"'
            )


def save_artifacts(folder: Path, step: int, values: Mapping[str, object]) -> list[Event]:
    """Write the values of `Recipe.artifacts` or `Recipe.log`; return an event for each.

    folder: the run's `artifacts`; paths in events are relative to its parent.  Text becomes UTF-8.
    """
    artifacts = files_of(values)
    check_names(artifacts)  # before anything is written
    step_folder = folder / f"step-{step:08d}"
    events: list[Event] = []
    for name, data in artifacts.items():
        step_folder.mkdir(parents=True, exist_ok=True)
        saved = write_whole(step_folder / name, partial(_fill, data))
        events.append(
            Artifact(
                step=step,
                name=name,
                path=saved.path.relative_to(folder.parent).as_posix(),
                size_bytes=saved.size_bytes,
                sha256=saved.sha256,
            )
        )
    return events


def _fill(data: bytes, file: BinaryIO) -> None:
    file.write(data)
