"""Record of an attempt's environment: machine, versions, command, source, git state.

Best effort: unavailable parts are left out, and no run fails because of it. Contains no secrets.
"""

import hashlib
import logging
import os
import platform
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pynvml

from db.runs.environments import LONGEST_BYTES, Texts
from db.tables import Worker
from halfstep import redaction
from worker.sandbox import run_environment

logger = logging.getLogger(__name__)

GIT_SECONDS = 10.0
NAMES_SHOWN = 50
#: Variables whose values are never shown: a command may have received one of them.
SECRETS = (
    *("HALFSTEP_DATABASE_URL", "HALFSTEP_STORAGE_URL", "HALFSTEP_SMTP_URL"),
    *("PGPASSWORD", "PGPASSFILE"),
)
GIT_OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")
#: In a submodule git would apply a configuration that the run's script may have written.
STATUS = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"),
    *("--ignore-submodules=dirty", "HEAD", "--", "."),
)
#: Repository settings that affect how files compare and cannot name a program.
HARMLESS = r"^core\.(autocrlf|eol|filemode|ignorecase|symlinks)$"
EXCLUDED_BYTES = 100_000


@dataclass(frozen=True)
class Started:
    """Command to start."""

    command: Sequence[str]
    folder: Path | None
    file: Path | None  # the recipe or script
    hidden: Sequence[str] = ()  # texts never shown


def described(
    started: Started, worker: Worker, devices: list[int]
) -> tuple[dict[str, Any], Texts] | None:
    """Return the environment record, or None if that fails, which is only logged."""
    try:
        return describe(started, worker, devices)
    except Exception:
        logger.exception("the environment of an attempt cannot be described")
        return None


def describe(started: Started, worker: Worker, devices: list[int]) -> tuple[dict[str, Any], Texts]:
    """Return the environment record; each git call may take up to 10 seconds."""
    hidden = [*started.hidden, *filter(None, map(os.environ.get, SECRETS))]
    source = _read(started.file) if started.file else None
    git, diff = _git_of(started.folder) if started.folder else (None, None)
    content = {
        "worker": worker.name,
        "host": worker.host,
        "platform": platform.platform(),
        "devices": [each for each in worker.devices if each["index"] in devices],
        "versions": {**worker.versions, "driver": _driver()},
        "command": redaction.command(started.command, *hidden),
        "folder": str(started.folder) if started.folder else None,
        "file": _file(started.file, source) if started.file and source is not None else None,
        "git": git,
    }
    texts = (
        None if each is None else redaction.source(_text(each), *hidden) for each in (source, diff)
    )
    return redaction.without(content, *hidden), Texts(*texts)


def _read(path: Path) -> bytes | None:
    """Return a file's content; None unless it is a regular file, whose end is certain."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _text(content: bytes) -> str:
    return content[:LONGEST_BYTES].decode(errors="replace")


def _file(path: Path, source: bytes) -> dict[str, Any]:
    return {
        "path": str(path),
        "sha256": hashlib.sha256(source).hexdigest(),
        "size_bytes": len(source),
        "is_cut": len(source) > LONGEST_BYTES,
    }


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def _git_of(folder: Path) -> tuple[dict[str, Any] | None, bytes | None]:
    """Return the commit and the diff, if any; None without git or a repository.

    If git fails, the first value holds the error.
    """
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD").decode().strip()
        with tempfile.TemporaryDirectory(prefix="halfstep-git-") as own:
            safely = _repository_of_our_own(folder, Path(own), commit)
            changes = _git(folder, *STATUS, **safely).decode(errors="replace")
            diff = _git(folder, *DIFF, **safely)
    except (OSError, _GitError) as error:
        is_none = isinstance(error, FileNotFoundError) or "not a git repository" in str(error)
        return (None if is_none else {"error": str(error)[:500]}), None
    untracked = re.findall(r"^\?\? (.+)$", changes, re.MULTILINE)
    git = {
        "commit": commit,
        "is_dirty": bool(changes),
        "untracked": untracked[:NAMES_SHOWN],
        "untracked_count": len(untracked),
        "is_cut": len(diff) > LONGEST_BYTES,
    }
    return git, diff or None


def _repository_of_our_own(folder: Path, own: Path, commit: str) -> dict[str, str]:
    """Create a repository that shares a folder's objects, index and files.

    It omits the folder's configuration (except `HARMLESS`), which a script may have written and
    which may name programs, such as filters and monitors. Returns the variables that make git use
    it. Raises OSError, _GitError.
    """
    paths = ("--git-path", "objects", "--git-path", "index", "--git-path", "info/exclude")
    queries = ("--path-format=absolute", "--show-toplevel", "--show-object-format", *paths)
    output = _git(folder, "rev-parse", *queries).decode(errors="surrogateescape").splitlines()
    if len(output) != 5:
        raise _GitError("the path of this repository has a line break")
    files, format_, objects, index, excluded = output
    for name in ("objects", "refs", "info"):
        (own / name).mkdir()
    (own / "HEAD").write_text(f"{commit}\n")
    text = f"[core]\nrepositoryformatversion = 1\n[extensions]\nobjectFormat = {format_}\n"
    (own / "config").write_text(text)
    if Path(excluded).is_file():
        with Path(excluded).open("rb") as file:
            (own / "info" / "exclude").write_bytes(file.read(EXCLUDED_BYTES))
    try:
        settings = _git(folder, "config", "--null", "--get-regexp", HARMLESS)
    except _GitError:  # none of these settings exist
        settings = b""
    for setting in filter(None, settings.decode(errors="surrogateescape").split("\0")):
        name, _, value = setting.partition("\n")
        _git(folder, "config", name, value or "true", GIT_DIR=str(own))
    return {
        "GIT_DIR": str(own),
        "GIT_WORK_TREE": files,
        "GIT_OBJECT_DIRECTORY": objects,
        "GIT_INDEX_FILE": index,
    }


class _GitError(Exception):
    """Failure reported by git; the message is git's."""


def _git(folder: Path, *words: str, **variables: str) -> bytes:
    """Return git's output, at most LONGEST_BYTES + 1. Raises OSError, _GitError."""
    environment = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **variables}
    process = subprocess.Popen(
        ["git", "-C", str(folder), *GIT_OPTIONS, *words],
        env={**run_environment.of_commands(), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    timer = threading.Timer(GIT_SECONDS, process.kill)
    timer.start()
    with process:
        output, errors = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
        stdout = output.read(LONGEST_BYTES + 1)
        output.close()  # does not wait for the rest of output that is too long
        complaint = errors.read(2000).decode(errors="replace")
    timer.cancel()
    if process.returncode and len(stdout) <= LONGEST_BYTES:
        raise _GitError(" ".join(complaint.split()) or f"git ended with {process.returncode}")
    return stdout
