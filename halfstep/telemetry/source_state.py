"""Source, git state and packages of what an attempt starts.

Of a command, its own process reads them in its sandbox (`worker.commands.command_runner`): a run
that could name a file to the supervisor would read any of the service's. Of a watched script, its
sidecar reads them. Best effort: unavailable parts are left out.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import IO, Annotated, cast

from msgspec import Meta, field
from msgspec.structs import replace

from halfstep import redaction
from halfstep.cli import command_sources
from halfstep.clock import clock
from halfstep.number_formats import duration
from halfstep.telemetry.attempt_messages import Message
from halfstep.telemetry.events import PATH_CHARACTERS, SOURCE_BYTES

GIT_SECONDS = 10.0  # for all calls of git together
NICENESS = 10  # of git: the training has precedence
NAMES_SHOWN = 50
#: Nothing that the repository names is run, and nothing is fetched, as by a partial clone.
OPTIONS = (
    *("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false"),
    *("-c", "protocol.allow=never"),
)
ENVIRONMENT = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
#: Also in a repository of another user, whose filters a comparison of files would run.
TRUSTING = ("-c", "safe.directory=*")
STATUS = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ":/")
DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short", "--binary"),
    *("--ignore-submodules=dirty", "HEAD", "--", ":/"),
)
UNTRACKED = ("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--")
#: Untracked code is part of the patch, unless git would have to quote its name.
CODE = (*command_sources.SUFFIXES, ".pyi", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h")
CODE_BYTES = 64_000
PLAIN_NAME = re.compile(r'[^\x00-\x1f"\\]+')

Name = Annotated[str, Meta(max_length=PATH_CHARACTERS)]
Names = Annotated[list[Name], Meta(max_length=NAMES_SHOWN)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Text = Annotated[str, Meta(max_length=SOURCE_BYTES)]


class SourceFile(Message, frozen=True, kw_only=True):
    """The recipe's or script's file."""

    path: Name
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    is_cut: bool  # whether `SourceState.source` is only its beginning


class GitState(Message, frozen=True, kw_only=True):
    """State of the repository of a folder, as far as git reports it."""

    error: Annotated[str, Meta(max_length=500)] | None = None  # why a part is missing
    commit: Annotated[str, Meta(max_length=64)] = ""
    branch: Name = ""  # empty: a detached HEAD
    remote: Name = ""  # URL, without credentials
    folder: Name = ""  # within the repository, with a slash at its end; empty: its root
    is_pushed: bool | None = None  # whether a remote branch has the commit, as last fetched
    is_dirty: bool = False
    changed: Names = field(default_factory=list)
    changed_count: Count = 0
    untracked: Names = field(default_factory=list)
    untracked_count: Count = 0
    is_cut: bool = False  # whether `SourceState.diff` is only its first files
    is_redacted: bool = False  # whether secrets in it are hidden


class SourceState(Message, frozen=True, kw_only=True):
    """description-<attempt>.json of a command or watched script; of a recipe it is no file."""

    file: SourceFile | None = None
    source: Text | None = None
    git: GitState | None = None
    diff: Text | None = None
    requirements: Text | None = None  # installed packages, a line each
    # Files of a command that have changed since it was queued.
    changed: Annotated[list[Name], Meta(max_length=command_sources.MOST_FILES)] = field(
        default_factory=list
    )


def read_state(
    file: Path | None, folder: Path, *, script_folder: Path | None = None, is_trusted: bool = True
) -> SourceState:
    """Return the state of a file and of the repository of a folder, in about GIT_SECONDS at most.

    folder: the working folder.  script_folder: its repository is preferred.  is_trusted: compare
    files also in a repository of another user. In a sandbox git may not own the folder, and what
    the repository names is run there.
    """
    git, diff = None, None
    if script_folder:
        git, diff = _git_of(_Git(script_folder), folder, is_trusted=is_trusted)
    if git is None:
        git, diff = _git_of(_Git(folder), folder, is_trusted=is_trusted)
    state = SourceState(git=git, diff=diff or None)
    if file is None or (source := _read(file)) is None:
        return state
    return replace(state, file=_file(file, source), source=_text(source))


def redact(state: SourceState, *secrets: str | None) -> SourceState:
    """Return the state with secrets in its texts hidden."""
    source, diff = (
        None if text is None else redaction.source(text, *secrets)[:SOURCE_BYTES]
        for text in (state.source, state.diff)
    )
    git = state.git and replace(state.git, is_redacted=diff != state.diff)
    return replace(state, source=source, diff=diff, git=git)


def requirements() -> str:
    """Return the installed packages in pip's format, a line each."""
    lines = {
        _requirement(distribution)
        for distribution in distributions()
        if distribution.metadata["Name"]
    }
    return "\n".join(sorted(lines, key=str.lower))[:SOURCE_BYTES]


def _requirement(package: Distribution) -> str:
    name, version = package.metadata["Name"], package.version
    with suppress(ValueError, TypeError, KeyError, AttributeError):  # no or another direct_url.json
        origin = json.loads(package.read_text("direct_url.json") or "")
        if commit := origin.get("vcs_info", {}).get("commit_id"):
            return f"{name} @ git+{without_credentials(origin['url'])}@{commit}"
        return f"# {name}=={version} from {without_credentials(origin['url'])}"
    return f"{name}=={version}"


def without_credentials(url: str) -> str:
    """Return a repository's URL without user and password; a user of SSH stays."""
    url = re.sub(r"^(https?://)[^/@]*@", r"\1", url, flags=re.IGNORECASE)
    url = re.sub(r"^(\w[\w+.-]*://[^/@:]*):[^/@]*@", r"\1@", url)
    return url.partition("?")[0].partition("#")[0]


def _read(path: Path) -> bytes | None:
    """Return a file's content; None unless it is a regular file, whose end is certain."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None


def _text(content: bytes) -> str:
    return content[:SOURCE_BYTES].decode(errors="replace")


def _file(path: Path, source: bytes) -> SourceFile:
    return SourceFile(
        path=str(path)[:PATH_CHARACTERS],
        sha256=hashlib.sha256(source).hexdigest(),
        size_bytes=len(source),
        is_cut=len(source) > SOURCE_BYTES,
    )


def _git_of(
    git: "_Git", working_folder: Path, *, is_trusted: bool
) -> tuple[GitState | None, str | None]:
    """Return the state of the repository and the patch, if any; None without git or repository."""
    try:
        state = GitState(
            commit=git.line("rev-parse", "--verify", "HEAD"),
            folder=_within(git, working_folder),
            branch=git.line("branch", "--show-current"),
            remote=_remote(git),
        )
    except (OSError, _GitError) as error:
        is_none = isinstance(error, FileNotFoundError) or "not a git repository" in str(error)
        return (None if is_none else GitState(error=str(error)[:500])), None
    git.trusting = TRUSTING if is_trusted else ()
    try:
        changes = git.output(*STATUS).decode(errors="replace").splitlines()
        untracked = [line[3:] for line in changes if line.startswith("?? ")]
        changed = [line[3:] for line in changes if not line.startswith("?? ")]
        state = replace(
            state,
            is_dirty=bool(changes),
            changed=_names(changed),
            changed_count=len(changed),
            untracked=_names(untracked),
            untracked_count=len(untracked),
        )
        diff, is_cut = _patch(git, has_untracked=bool(untracked))
        is_pushed = not git.output("rev-list", "-n1", "HEAD", "--not", "--remotes")
        return replace(state, is_cut=is_cut, is_pushed=is_pushed if state.remote else None), diff
    except (OSError, _GitError) as error:
        return replace(state, error=str(error)[:500]), None


def _names(names: Sequence[str]) -> list[str]:
    return [name[:PATH_CHARACTERS] for name in names[:NAMES_SHOWN]]


def _remote(git: "_Git") -> str:
    """Return the URL of the branch's remote; without one git returns the name "origin"."""
    with suppress(_GitError):
        url = git.line("ls-remote", "--get-url")
        return "" if url == "origin" else without_credentials(url)
    return ""


def _within(git: "_Git", folder: Path) -> str:
    """Return the path of a folder within the repository; empty if it is its root, or elsewhere."""
    with suppress(_GitError, ValueError, OSError):
        path = folder.resolve().relative_to(git.line("rev-parse", "--show-toplevel"))
        return "" if path == Path() else f"{path}/"[:PATH_CHARACTERS]
    return ""


def _patch(git: "_Git", *, has_untracked: bool) -> tuple[str, bool]:
    """Return the patch from the commit to the files, and whether it is cut."""
    patch = git.output(*DIFF)
    if has_untracked:
        top = Path(git.line("rev-parse", "--show-toplevel"))
        listed = git.output(*UNTRACKED, *(f":(top,glob)**/*{suffix}" for suffix in CODE))
        for name in listed.decode(errors="surrogateescape").split("\0")[:-1]:
            if len(patch) <= SOURCE_BYTES:
                patch += _make_patch(top, name)
    if len(patch) <= SOURCE_BYTES:
        return patch.decode(errors="replace"), False
    text = _text(patch)
    # Of whole files, which `git apply` accepts.
    return text[: text.rfind("\ndiff --git ") + 1] or text, True


def _make_patch(top: Path, name: str) -> bytes:
    """Return the patch that adds an untracked file; empty if it has no place in a patch."""
    path = top / name
    with suppress(OSError, UnicodeEncodeError):
        is_plain = PLAIN_NAME.fullmatch(name) and not _holds_secrets(path)
        if not is_plain or not path.is_file() or path.stat().st_size > CODE_BYTES:
            return b""
        content, mode = path.read_bytes(), "755" if os.access(path, os.X_OK) else "644"
        if b"\0" in content:
            return b""
        head = f"diff --git a/{name} b/{name}\nnew file mode 100{mode}\n".encode()
        if not content:
            return head
        lines = content.removesuffix(b"\n").split(b"\n")
        head += f"--- /dev/null\n+++ b/{name}\t\n@@ -0,0 +1,{len(lines)} @@\n".encode()
        end = b"" if content.endswith(b"\n") else b"\\ No newline at end of file\n"
        return head + b"".join(b"+" + line + b"\n" for line in lines) + end
    return b""


def _holds_secrets(path: Path) -> bool:
    """Return whether a file of settings is named for secrets, such as secrets.yaml."""
    is_settings = path.suffix in (".yaml", ".yml", ".toml", ".sh")
    return is_settings and redaction.is_secret(path.stem.removesuffix("s"))


class _GitError(Exception):
    """Failure reported by git; the message is git's."""


class _Git:
    """git in a folder, until its time is over."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._deadline = folder, clock() + GIT_SECONDS
        self.trusting: Sequence[str] = TRUSTING

    def line(self, *words: str) -> str:
        """Return git's output as a text. Raises OSError, _GitError."""
        return self.output(*words).decode(errors="replace").strip()[:PATH_CHARACTERS]

    def output(self, *words: str) -> bytes:
        """Return git's output, at most SOURCE_BYTES + 1. Raises OSError, _GitError."""
        process = subprocess.Popen(
            ["git", "-C", str(self._folder), *OPTIONS, *self.trusting, *words],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with its filters

        timer = threading.Timer(max(self._deadline - clock(), 0), end)
        timer.start()
        with process:
            output, errors = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
            stdout = output.read(SOURCE_BYTES + 1)
            output.close()  # does not wait for the rest of output that is too long
            complaint = errors.read(2000).decode(errors="replace")
        timer.cancel()
        if is_late.is_set():
            raise _GitError(
                f"git {words[0]} was ended: git took longer than {duration(GIT_SECONDS)}"
            )
        if process.returncode and len(stdout) <= SOURCE_BYTES:
            code = f"git exited with code {process.returncode}"
            raise _GitError(" ".join(complaint.split()) or code)
        return stdout
