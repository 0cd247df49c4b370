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
#: Of one check; the command tells them all.
MOST_FINDINGS = 20
LONGEST = 500

Kept = dict[str, Any]  # {reference: "/path/mine.py:Mine", check: {sha256, findings, left_out}}


class NotRegisteredError(Exception):
    """The list cannot be read or changed so; the message says why."""


def path() -> Path:
    """Return the path of the list, in the workers' data folder."""
    return Path(os.environ.get("HALFSTEP_DATA", "data")).resolve() / "recipes.json"


def read() -> list[Kept]:
    """Return the list. Raises NotKeptError if the file holds something else."""
    try:
        kept = json.loads(path().read_text())["recipes"]
        if all(isinstance(each["reference"], str) for each in kept):
            return list(kept)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise NotRegisteredError(
            f"{path()} cannot be read: {type(error).__name__}: {error}"
        ) from error
    raise NotRegisteredError(f"{path()} holds a reference that is no text")


def look_for_folder() -> None:
    """Raise NotKeptError if there is no data folder to keep the list in."""
    if not path().parent.is_dir():
        raise NotRegisteredError(
            f"there is no data folder {path().parent}: go to where the worker is started, or name "
            "its folder by HALFSTEP_DATA"
        )


def add(reference: str) -> None:
    """Keep a recipe, next to other classes of its file. Raises NotKeptError."""
    look_for_folder()
    with _changing() as kept:
        references = [each["reference"] for each in kept]
        if reference in references:  # the first of a name has it, and goes on to
            kept[references.index(reference)] = {"reference": reference}
        elif len(kept) >= MOST:
            raise NotRegisteredError(f"{len(kept)} recipes are kept; allowed: {MOST} at most")
        else:
            kept.append({"reference": reference})


def remove(wanted: str) -> list[str]:
    """Keep a file no longer, or one class of it; return what was. Raises NotKeptError."""
    file, _, name = wanted.rpartition(":") if not wanted.endswith(".py") else (wanted, "", "")
    resolved = str(Path(file).expanduser().resolve())
    with _changing() as kept:
        gone = [
            each["reference"]
            for each in kept
            if _file(each["reference"]) == resolved
            and each["reference"].endswith(f":{name}" * bool(name))
        ]
        if not gone:
            known = ", ".join(each["reference"] for each in kept) or "none"
            raise NotRegisteredError(f"{wanted} is not kept; kept are: {known}")
        kept[:] = [each for each in kept if each["reference"] not in gone]
    return gone


def note_check(reference: str, findings: list[dict[str, Any]]) -> None:
    """Write down what the check found in a class, if it is kept.

    findings: [{severity, place, text, precisions}]
    """
    if not any(each["reference"] == reference for each in read()):
        return
    noted = [{**each, "text": each["text"][:LONGEST]} for each in findings[:MOST_FINDINGS]]
    check = {
        "sha256": checksum(Path(_file(reference))),
        "findings": noted,
        "left_out": len(findings) - len(noted),
    }
    with _changing() as kept:
        for each in kept:
            if each["reference"] == reference:
                each["check"] = check


def check_of(reference: str) -> dict[str, Any] | None:
    """Return what the check said last, and whether the file is another since; None: not asked."""
    for each in read():
        if each["reference"] == reference and "check" in each:
            is_same = checksum(Path(_file(reference))) == each["check"]["sha256"]
            return {**each["check"], "is_outdated": not is_same}
    return None


def _file(reference: str) -> str:
    return reference.rpartition(":")[0]


@contextmanager
def _changing() -> Iterator[list[Kept]]:
    """Let the list be changed, by one at a time; it is written whole or not at all."""
    with folder_lock.held(path().with_name(".recipes.lock")):
        kept = read()
        yield kept
        text = json.dumps({"recipes": kept}, indent=1)
        write_whole(path(), lambda file: file.write(text.encode()))
