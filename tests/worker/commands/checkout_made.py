"""Shared helpers of the tests of checkout."""

import subprocess
from pathlib import Path


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=ada", "-c", "user.email=ada@localhost"]
    command = ["git", *options, "-c", "protocol.file.allow=always", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_files(folder: Path, **files: str) -> str:
    """Commit files in a repository, which is created if missing; return the hash."""
    folder.mkdir(exist_ok=True)
    git(folder, "init", "--quiet")
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")
