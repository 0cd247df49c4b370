"""Shared helpers of the attacks, which run outside of the tests with any Python 3.11."""

# ruff: noqa: B023 - called at once
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def plan() -> Any:
    """Read the plan that the test has written."""
    return json.loads(Path(sys.argv[1]).read_text())


def report(result: Any) -> None:
    """Print a result for the test."""
    print("RESULT " + json.dumps(result), flush=True)


def outcome(attempt: Callable[[], Any]) -> str:
    """Call an attempt; return "done" or the name of the error."""
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "done"


def list_succeeded(attempts: dict[str, Callable[[], Any]]) -> list[str]:
    """Return the names of attempts that succeeded."""
    return [name for name, attempt in attempts.items() if outcome(attempt) == "done"]


def list_own_folders() -> Iterator[Path]:
    """Yield this run's own folders, the working folder first, since it stays longest."""
    named = [str(Path.cwd()), os.environ.get("HALFSTEP_RUN_FOLDER"), os.environ.get("TMPDIR")]
    folders = [Path(each).resolve() for each in named if each]
    yield from dict.fromkeys(folders)


def writable_folders() -> list[Path]:
    """Return the folders below the run's own in which it can create files."""
    found = []
    for start in list_own_folders():
        for place, folders, _files in os.walk(start):
            folders[:] = [each for each in folders if not each.startswith(".git")]
            probe = Path(place, ".probe")
            if outcome(lambda: probe.open("x").close()) == "done":
                probe.unlink()
                found.append(Path(place))
    return list(dict.fromkeys(found))


def folders_with_links() -> list[Path]:
    """Return those in which the run can also create symbolic links."""
    result = []
    for each in writable_folders():
        link = each / ".link"
        if outcome(lambda: link.symlink_to("/dev/null")) == "done":
            link.unlink()
            result.append(each)
    return result
