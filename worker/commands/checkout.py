"""Checks out a git repository at a commit as the working folder of a command."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from halfstep.sandbox import deferred
from worker.sandbox.sandbox import START

WAIT_SECONDS = 0.4
#: No prompts, no other protocols, which could read files or run programs; transfers below 1 kB/s
#: for a minute are aborted.
OPTIONS = {
    "protocol.allow": "never",
    "protocol.https.allow": "always",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "advice.detachedHead": "false",
}
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true"}


class CannotCheckOut(Exception):
    """The commit cannot be checked out; the message has git's error."""


def check_out(
    url: str,
    commit: str,
    folder: Path,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    user: int | None = None,
    sandbox: Callable[[Path], Mapping[str, str]] = lambda _folder: {},
) -> str:
    """Check out a commit with its submodules into a folder; return its full hash.

    Submodules of a repository on the network cannot be local. An existing folder, from an earlier
    attempt, stays unchanged, including files that the script has written.

    meanwhile: called periodically; its exceptions end git.  user: owner of the existing folder.
    sandbox: returns the variable of the sandbox in which git writes a folder, if any.
    Raises CannotCheckOut, OSError.
    """

    local = "always" if url.startswith("file:") else "never"

    def git(*words: str, user: int | None = None) -> str:
        options = OPTIONS | {"protocol.file.allow": local}
        return _git(words, options, environment, meanwhile, user, sandboxed)

    sandboxed = sandbox(folder)
    if not folder.exists():
        # A unique name: git of a killed supervisor may still be running.
        for left in folder.parent.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        partial.mkdir()
        sandboxed = sandbox(partial)
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
        partial.rename(folder)
    elif user is not None:  # its script's files must not be read as root
        return git("-C", str(folder), "rev-parse", "HEAD", user=user)
    return git("-C", str(folder), "rev-parse", "HEAD")


def _git(
    words: tuple[str, ...],
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    user: int | None,
    sandboxed: Mapping[str, str],
) -> str:
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    argv = ["git", *options, *words]
    environment = {**environment, **ENVIRONMENT}
    if sandboxed:  # the user's variables may name programs, e.g. GIT_CONFIG_*
        argv, environment = [*START, *argv], {**sandboxed, **deferred(environment)}
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except FileNotFoundError as error:
        raise CannotCheckOut("git is not installed on this worker") from error
    with process:
        while True:
            try:
                output, errors = process.communicate(timeout=WAIT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                try:
                    meanwhile()
                except BaseException:
                    # With its helper, which has the connection.
                    os.killpg(process.pid, signal.SIGKILL)
                    raise
    if process.returncode:
        message = " ".join(errors.split()) or f"exit code {process.returncode}"
        raise CannotCheckOut(f"git {_named(words)} failed: {message[:2000]}")
    return output.strip()


def _named(words: tuple[str, ...]) -> str:
    """Return a git command for a message, without internal folders."""
    if words[0] == "clone":
        return f"clone {words[-2 if words[-1].endswith('.partial') else -1]}"
    return " ".join(words[2:])
