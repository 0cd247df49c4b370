"""Artifacts: what a recipe leaves to look at after an evaluation: samples of text, images.

<run folder>/artifacts/step-00000400/<name>
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from halfstep.recipe import RecipeError
from halfstep.spool import Event
from trainer.files import write_whole

#: A name with a suffix, without a folder, that does not begin with a dot.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.[A-Za-z0-9]{1,16}")


def check_names(artifacts: Mapping[str, bytes | str]) -> None:
    """Raise RecipeError for a name that is not a plain file name."""
    for name in artifacts:
        if not NAME.fullmatch(name):
            raise RecipeError(
                f"an artifact is named {name!r}: take letters, digits, '.', '_' and '-', with a "
                'suffix and no folder, such as "samples.txt"'
            )


def save_artifacts(folder: Path, step: int, artifacts: Mapping[str, bytes | str]) -> list[Event]:
    """Write what `Recipe.artifacts` returned; return an event for each.

    folder: the run's `artifacts`, whose parent the events' paths begin at.  Text becomes UTF-8.
    """
    check_names(artifacts)  # before anything is written
    place = folder / f"step-{step:08d}"
    events: list[Event] = []
    for name, content in artifacts.items():
        place.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        saved = write_whole(place / name, partial(_fill, data))
        events.append(
            {
                "event": "artifact",
                "step": step,
                "name": name,
                "path": saved.path.relative_to(folder.parent).as_posix(),
                "size_bytes": saved.size_bytes,
                "sha256": saved.sha256,
            }
        )
    return events


def _fill(data: bytes, file: BinaryIO) -> None:
    file.write(data)
