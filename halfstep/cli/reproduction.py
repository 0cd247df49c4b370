"""Shell commands that bring commit, patch, packages and command of a run back."""

import re
import shlex
from typing import TYPE_CHECKING, Any

from halfstep.cli import command_line
from halfstep.redaction import HIDDEN

if TYPE_CHECKING:
    from halfstep.api_client.response_types import FullEnvironment, Git

#: A build of torch that is not on PyPI: torch==2.9.0+cu126.
TORCH_BUILD = re.compile(r"^torch==\S+\+(cu[0-9]+|cpu|xpu|rocm[0-9.]+)$", re.MULTILINE)


def script(run_id: int, environment: "FullEnvironment") -> str:
    """Return the commands as a text for a POSIX shell, with a comment on what they lack.

    A recipe's run is submitted again: its process is the worker's.
    """
    if again := environment.get("submit_command"):
        return "\n".join([*(f"# {note}" for note in recipe_notes(run_id, environment)), again])
    git, python = environment["git"], environment["versions"].get("python")
    command = f"halfstep run reproduce {run_id}"
    where = f"attempt {environment['attempt']} on {environment['host']}"
    lines = [f"# Run {run_id}, {where}", *(f"# {note}" for note in missing(environment))]
    if git and git["commit"]:
        if git.get("remote"):
            lines.append(f"git clone -- {shlex.quote(git['remote'])} run-{run_id}")
            lines.append(f"cd run-{run_id}")
        elif environment["folder"]:
            lines.append(f"cd -- {shlex.quote(environment['folder'])}")
            lines.append('cd -- "$(git rev-parse --show-toplevel)"')
        lines.append(f"git checkout --detach {git['commit']}")
        if environment["diff"]:
            lines.append(f"{command} --patch | git apply")
        if git.get("folder"):
            lines.append(f"cd -- {shlex.quote(git['folder'])}")
    elif environment["folder"]:
        lines.append(f"cd -- {shlex.quote(environment['folder'])}")
    if environment["requirements"]:
        version = ".".join((python or "3").split(".")[:2])
        lines += [f"python{version} -m venv .venv", ". .venv/bin/activate"]
        lines.append(f"{command} --requirements > .venv/requirements.txt")
        lines.append("pip install -r .venv/requirements.txt")
    if environment["command"]:
        lines.append(shlex.join(environment["command"]))
    return "\n".join(lines)


def recipe_notes(run_id: int, environment: "FullEnvironment") -> list[str]:
    """Return where a recipe's run was trained, and what differs today, a sentence each."""
    git, notes = environment["git"], []
    if file := environment["file"]:
        at = f" at commit {git['commit']}" if git and git["commit"] else ""
        changes = ", with uncommitted changes" if at and git and git["is_dirty"] else ""
        notes.append(f"Its recipe was {file['path']}{at}{changes}.")
    if environment["has_other_source"]:
        notes.append("The recipe's source has changed since; `--json` has the earlier one.")
    where = f"attempt {environment['attempt']} on {environment['host']}"
    return [" ".join(note.split()) for note in (f"Run {run_id}, {where}", *notes)]


def requirements(environment: "FullEnvironment") -> str:
    """Return the packages for pip, with the index of torch's builds."""
    text = environment["requirements"] or ""
    if build := TORCH_BUILD.search(text):
        return f"--extra-index-url https://download.pytorch.org/whl/{build[1]}\n{text}"
    return text


def missing(environment: "FullEnvironment") -> list[str]:
    """Return what a repetition would lack, a sentence each."""
    git = environment["git"]
    notes = []
    if git is None or not git["commit"]:
        notes.append("No commit is recorded: the files may have changed since.")
    else:
        if not git.get("remote"):
            notes.append("The repository has no remote: it is only on that machine.")
        elif git.get("is_pushed") is False:
            notes.append("The commit was on no branch of the remote.")
        notes += _lost_changes(git)
        patch = environment["diff"] or ""
        if lost := [name for name in git["untracked"] if f" b/{name}" not in patch]:
            notes.append(f"Untracked files are not stored: {', '.join(lost)}")
    if git and git["error"]:
        notes.append(f"Changes are not recorded: {git['error']}")
    if re.search(r"^# ", environment["requirements"] or "", re.MULTILINE):
        notes.append("Packages installed from a folder are comments in the list of packages.")
    if any(HIDDEN in word for word in environment["command"]):
        notes.append(f"Secrets of the command are replaced by {HIDDEN}.")
    return [" ".join(note.split()) for note in notes]


def _lost_changes(git: "Git") -> list[str]:
    """Return what is missing of the changes of tracked files in the patch."""
    notes = []
    if git["is_cut"]:
        notes.append("The patch is incomplete: only its first files are stored.")
    if git.get("is_redacted"):
        notes.append(f"Secrets in the patch are replaced by {HIDDEN}; it may not apply.")
    return notes


def obstacles(environment: "FullEnvironment") -> list[str]:
    """Return why a run cannot be queued from its commit; empty if it can."""
    git, command = environment["git"], environment["command"]
    texts = []
    if git is None or not git["commit"]:
        return ["no commit is recorded"]
    if not re.match(r"(https|file)://", git.get("remote", "")):
        texts.append(f"its remote is {git.get('remote') or 'unknown'}; allowed: https://…")
    if git.get("is_pushed") is False:
        texts.append("its commit is on no branch of the remote")
    if git["is_dirty"]:
        texts += _lost_changes(git)
        if git["changed"] and not environment["diff"]:
            texts.append("its uncommitted changes are not stored")
    if git["error"]:
        texts.append(git["error"])
    if not command or any(HIDDEN in word for word in command):
        texts.append("its command is not known, or has secrets")
    return texts


def command_of(environment: "FullEnvironment") -> dict[str, Any]:
    """Return the arguments with which `Client.submit_command` queues a run from its commit."""
    git: Any = environment["git"] or {}
    line = command_line.PLACEHOLDER.sub(r"{{\2}}", shlex.join(environment["command"]))
    place = {"git": git["remote"], "commit": git["commit"], "patch": environment["diff"] or ""}
    return {"line": line, "folder": git["folder"].rstrip("/"), **place}
