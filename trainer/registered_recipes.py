"""Recipe files that this machine's workers offer, registered by `halfstep recipe add`.

recipes.json in the data folder lists them, each with the last result of its check. Workers reload
it when it changes.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.telemetry import folder_lock
from trainer.checkpoints.files import checksum, write_whole

MOST = 200
#: Per check; the command prints all of them.
MOST_FINDINGS = 20
LONGEST = 500

Kept = dict[str, Any]  # {reference: "/path/mine.py:Mine", check: {sha256, findings, left_out}}


class NotRegisteredError(Exception):
    """The list cannot be read or changed; the message has the reason."""


def path() -> Path:
    """Return the path of the list, in the workers' data folder."""
    return Path(os.environ.get("HALFSTEP_DATA", "data")).resolve() / "recipes.json"


def read() -> list[Kept]:
    """Return the list. Raises NotRegisteredError if the file is invalid."""
    try:
        recipes = json.loads(path().read_text())["recipes"]
        if all(isinstance(recipe["reference"], str) for recipe in recipes):
            return list(recipes)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise NotRegisteredError(
            f"{path()} cannot be read: {type(error).__name__}: {error}"
        ) from error
    raise NotRegisteredError(f"{path()} holds a reference that is not a text")


def look_for_folder() -> None:
    """Raise NotRegisteredError if the data folder does not exist."""
    if not path().parent.is_dir():
        raise NotRegisteredError(
            f"there is no data folder {path().parent}: run this where the worker is started, or "
            "set HALFSTEP_DATA to its folder"
        )


def add(reference: str) -> None:
    """Register a recipe. Raises NotRegisteredError."""
    look_for_folder()
    with _changing() as recipes:
        references = [recipe["reference"] for recipe in recipes]
        # Replaces it at its position, which decides the use of its name.
        if reference in references:
            recipes[references.index(reference)] = {"reference": reference}
        elif len(recipes) >= MOST:
            raise NotRegisteredError(
                f"{len(recipes)} recipes are registered; allowed: {MOST} at most"
            )
        else:
            recipes.append({"reference": reference})


def remove(target: str) -> list[str]:
    """Unregister a file, or one class of it; return the removed references.

    Raises NotRegisteredError.
    """
    file, _, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    resolved = str(Path(file).expanduser().resolve())
    with _changing() as recipes:
        gone = [
            recipe["reference"]
            for recipe in recipes
            if _file(recipe["reference"]) == resolved
            and recipe["reference"].endswith(f":{name}" * bool(name))
        ]
        if not gone:
            known = ", ".join(recipe["reference"] for recipe in recipes) or "none"
            raise NotRegisteredError(f"{target} is not registered; registered are: {known}")
        recipes[:] = [recipe for recipe in recipes if recipe["reference"] not in gone]
    return gone


def note_check(reference: str, findings: list[dict[str, Any]]) -> None:
    """Store the check's findings for a class, if it is registered.

    findings: [{severity, place, text, precisions}]
    """
    if not any(recipe["reference"] == reference for recipe in read()):
        return
    noted = [{**finding, "text": finding["text"][:LONGEST]} for finding in findings[:MOST_FINDINGS]]
    check = {
        "sha256": checksum(Path(_file(reference))),
        "findings": noted,
        "left_out": len(findings) - len(noted),
    }
    with _changing() as recipes:
        for recipe in recipes:
            if recipe["reference"] == reference:
                recipe["check"] = check


def check_of(reference: str) -> dict[str, object] | None:
    """Return the last check, and whether the file has changed since; None: not checked."""
    for recipe in read():
        if recipe["reference"] == reference and "check" in recipe:
            is_same = checksum(Path(_file(reference))) == recipe["check"]["sha256"]
            return {**recipe["check"], "is_outdated": not is_same}
    return None


def _file(reference: str) -> str:
    return reference.rpartition(":")[0]


@contextmanager
def _changing() -> Iterator[list[Kept]]:
    """Lock and load the list, and write it back atomically."""
    with folder_lock.held(path().with_name(".recipes.lock")):
        recipes = read()
        yield recipes
        text = json.dumps({"recipes": recipes}, indent=1)
        write_whole(path(), lambda file: file.write(text.encode()))
