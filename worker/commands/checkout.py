"""Checks out a git repository at a commit as the working folder of a command."""

import fnmatch
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from halfstep import untrusted_files
from halfstep.isolation import Isolation
from halfstep.sandbox import defer
from worker.sandbox.sandbox import ISOLATED

WAIT_SECONDS, MOST_CHARACTERS = 0.4, 2**16
#: No prompts, no other protocols, which could read files or run programs; transfers below 1 kB/s
#: for a minute are aborted.
OPTIONS = {
    "protocol.allow": "never",
    "protocol.https.allow": "always",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "advice.detachedHead": "false",
}
NO_ISOLATION = Isolation()
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true"}


class CannotCheckOut(Exception):
    """The commit cannot be checked out; the message has git's error."""


def check_out(
    url: str,
    commit: str,
    folder: Path,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    isolation: Isolation = NO_ISOLATION,
    patch: str = "",
) -> str:
    """Check out a commit with its submodules into a folder; return its full hash.

    patch: changes that are applied to it, within the folder.

    Submodules of a repository on the network cannot be local. An existing folder, from an earlier
    attempt, stays unchanged, including files that the script has written.

    meanwhile: called periodically; its exceptions end git.  isolation: of the run, in which git
    runs, as its user.
    Raises CannotCheckOut, OSError.
    """

    local = "always" if url.startswith("file:") else "never"

    def git(*words: str, given: str = "") -> str:
        options = OPTIONS | {"protocol.file.allow": local}
        return _git(words, options, environment, meanwhile, isolation, given)

    root, name = folder.parent, folder.name
    if not untrusted_files.is_folder(root, name):
        # A unique name: git of a killed supervisor may still be running.
        for left in fnmatch.filter(untrusted_files.names(root), f".{name}.*.partial"):
            untrusted_files.delete(root, left)
        partial = folder.with_name(f".{name}.{os.getpid()}.partial")
        untrusted_files.make_folder(root, partial.name)
        if isolation.user is not None:
            untrusted_files.give(partial, isolation.user, range(0))
        git("clone", "--quiet", "--no-checkout", "--", url, str(partial))
        # A branch may have a name that looks like a hash.
        try:
            whole = git("-C", str(partial), "rev-parse", "--verify", f"{commit}^{{commit}}")
        except CannotCheckOut as error:
            raise CannotCheckOut(f"{url} has no commit {commit}: {error}") from error
        if not whole.startswith(commit.lower()):
            raise CannotCheckOut(f"{url} has no commit {commit}: that is a name of {whole}")
        git("-C", str(partial), "checkout", "--quiet", "--detach", whole)
        git("-C", str(partial), "submodule", "--quiet", "update", "--init", "--recursive")
        if patch:
            git("-C", str(partial), "apply", "--whitespace=nowarn", "-", given=patch)
        untrusted_files.rename(root, partial.name, name)
        return whole
    return git("-C", str(folder), "rev-parse", "HEAD")


def _git(
    words: tuple[str, ...],
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    isolation: Isolation,
    given: str,
) -> str:
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    argv = ["git", *options, *words]
    environment = {**environment, **ENVIRONMENT}
    if isolation.sandbox:  # the user's variables may name programs, e.g. GIT_CONFIG_*
        argv, environment = [*ISOLATED, *argv], isolation.variable() | defer(environment)
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise CannotCheckOut("git is not installed on this worker") from error
    with process:
        streams = [cast("IO[str]", process.stdout), cast("IO[str]", process.stderr)]
        with ThreadPoolExecutor(1 + len(streams)) as readers:
            readers.submit(_write, cast("IO[str]", process.stdin), given)
            reading = [readers.submit(_beginning, stream) for stream in streams]
            try:
                _wait(process, meanwhile)
            except BaseException:
                # With its helper, which has the connection.
                os.killpg(process.pid, signal.SIGKILL)
                raise
        output, errors = (future.result() for future in reading)
    if process.returncode:
        message = " ".join(errors.split()) or f"exit code {process.returncode}"
        raise CannotCheckOut(f"git {_named(words)} failed: {message[:2000]}")
    return output.strip()


def _wait(process: subprocess.Popen[str], meanwhile: Callable[[], None]) -> None:
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_SECONDS)
        if process.returncode is None:
            meanwhile()


def _write(stream: IO[str], text: str) -> None:
    with suppress(BrokenPipeError), stream:
        stream.write(text)


def _beginning(stream: IO[str]) -> str:
    """Read a stream to its end; return its beginning. A repository can make git print anything."""
    text = stream.read(MOST_CHARACTERS)
    while stream.read(MOST_CHARACTERS):
        pass
    return text


def _named(words: tuple[str, ...]) -> str:
    """Return a git command for a message, without internal folders."""
    if words[0] == "clone":
        return f"clone {words[-2 if words[-1].endswith('.partial') else -1]}"
    return " ".join(words[2:])
