"""Source and git state of what an attempt starts.

Of a command, its own process reads them in its sandbox (`worker.commands.command_runner`): a run
that could name a file to the supervisor would read any of the service's. Best effort: unavailable
parts are left out.
"""

import hashlib
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import IO, Annotated, cast

from msgspec import Meta, field
from msgspec.structs import replace

from db.runs.environments import LONGEST_BYTES
from halfstep.cli import command_sources
from halfstep.telemetry.attempt_messages import Message

GIT_SECONDS = 10.0
NAMES_SHOWN, NAME_CHARACTERS = 50, 4096
OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")
#: In a sandbox git may not own the folder, and what the repository names is run there.
TRUSTING = ("-c", "safe.directory=*")
STATUS = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"),
    *("--ignore-submodules=dirty", "HEAD", "--", "."),
)

Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
Text = Annotated[str, Meta(max_length=LONGEST_BYTES)]


class SourceFile(Message, frozen=True, kw_only=True):
    """The recipe's or script's file."""

    path: Name
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    is_cut: bool  # whether `SourceState.source` is only its beginning


class GitState(Message, frozen=True, kw_only=True):
    """State of the repository of a folder, or git's error."""

    error: Annotated[str, Meta(max_length=500)] | None = None
    commit: Annotated[str, Meta(max_length=64)] = ""
    is_dirty: bool = False
    untracked: Annotated[list[Name], Meta(max_length=NAMES_SHOWN)] = field(default_factory=list)
    untracked_count: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    is_cut: bool = False  # whether `SourceState.diff` is only its beginning


class SourceState(Message, frozen=True, kw_only=True):
    """description-<attempt>.json of a command; of a recipe it is no file."""

    file: SourceFile | None = None
    source: Text | None = None
    git: GitState | None = None
    diff: Text | None = None
    # Files of a command that have changed since it was queued.
    changed: Annotated[list[Name], Meta(max_length=command_sources.MOST_FILES)] = field(
        default_factory=list
    )


def read_state(file: Path | None, folder: Path) -> SourceState:
    """Return the state of a file and of the repository of a folder.

    Each of the git calls may take up to 10 seconds.
    """
    git, diff = _git_of(folder)
    state = SourceState(git=git, diff=_text(diff) if diff else None)
    if file is None or (source := _read(file)) is None:
        return state
    return replace(state, file=_file(file, source), source=_text(source))


def _read(path: Path) -> bytes | None:
    """Return a file's content; None unless it is a regular file, whose end is certain."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _text(content: bytes) -> str:
    return content[:LONGEST_BYTES].decode(errors="replace")


def _file(path: Path, source: bytes) -> SourceFile:
    return SourceFile(
        path=str(path),
        sha256=hashlib.sha256(source).hexdigest(),
        size_bytes=len(source),
        is_cut=len(source) > LONGEST_BYTES,
    )


def _git_of(folder: Path) -> tuple[GitState | None, bytes | None]:
    """Return the commit and the diff, if any; None without git or a repository."""
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD").decode().strip()
        changes = _git(folder, *STATUS).decode(errors="replace")
        diff = _git(folder, *DIFF)
    except (OSError, _GitError) as error:
        is_none = isinstance(error, FileNotFoundError) or "not a git repository" in str(error)
        return (None if is_none else GitState(error=str(error)[:500])), None
    untracked = re.findall(r"^\?\? (.+)$", changes, re.MULTILINE)
    git = GitState(
        commit=commit,
        is_dirty=bool(changes),
        untracked=[name[:NAME_CHARACTERS] for name in untracked[:NAMES_SHOWN]],
        untracked_count=len(untracked),
        is_cut=len(diff) > LONGEST_BYTES,
    )
    return git, diff or None


class _GitError(Exception):
    """Failure reported by git; the message is git's."""


def _git(folder: Path, *words: str) -> bytes:
    """Return git's output, at most LONGEST_BYTES + 1. Raises OSError, _GitError."""
    process = subprocess.Popen(
        ["git", "-C", str(folder), *OPTIONS, *TRUSTING, *words],
        env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
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
        raise _GitError(" ".join(complaint.split()) or f"git exited with code {process.returncode}")
    return stdout
