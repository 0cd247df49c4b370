"""Commands that repeat a run, and the command that a queue would get."""

import subprocess
from typing import Any

from halfstep.cli import reproduction

GIT = {
    **{"commit": "c0ffee1", "branch": "main", "remote": "https://host/a.git", "folder": "src/"},
    **{"is_pushed": True, "is_dirty": False, "changed": [], "changed_count": 0, "error": None},
    **{"untracked": [], "untracked_count": 0, "is_cut": False, "is_redacted": False},
}


def environment(git: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return a run's recorded environment."""
    return {
        **{"attempt": 1, "host": "gpu-7", "folder": "/home/ada", "versions": {"python": "3.12.1"}},
        **{"command": ["python", "train.py", "--name", "it's {a}"], "diff": None},
        **{"requirements": "torch==2.9.0+cu126\nx==1", "git": GIT | (git or {})},
        **changes,
    }


def test_the_commands_are_a_shell_script() -> None:
    """The commands form a shell script with one for each recorded part, and texts are quoted."""
    text = reproduction.script(7, environment({"remote": "https://host/a b;.git"}, diff="+x"))
    assert text.splitlines() == [
        "# Run 7, attempt 1 on gpu-7",
        "git clone -- 'https://host/a b;.git' run-7",
        "cd run-7",
        "git checkout --detach c0ffee1",
        "halfstep run reproduce 7 --patch | git apply",
        "cd -- src/",
        "python3.12 -m venv .venv",
        ". .venv/bin/activate",
        "halfstep run reproduce 7 --requirements > .venv/requirements.txt",
        "pip install -r .venv/requirements.txt",
        "python train.py --name 'it'\"'\"'s {a}'",
    ]
    subprocess.run(["sh", "-n", "-c", text], check=True)


def test_what_is_missing_is_said() -> None:
    """Each part that was not recorded is a comment of one line."""
    git = {"remote": "", "untracked": ["a.bin", "b.py"], "is_cut": True, "is_redacted": True}
    git |= {"error": "git\nfailed"}
    notes = reproduction.missing(
        environment(git, diff="+++ b/b.py", requirements="# x==1 from file:///x", command=["***"])
    )
    assert len(notes) == 7
    assert "Untracked files are not stored: a.bin" in notes
    assert "Changes are not recorded: git failed" in notes
    alone = reproduction.script(7, environment() | {"git": None, "requirements": None})
    assert alone.splitlines()[2] == "cd -- /home/ada"
    local = reproduction.script(7, environment({"remote": ""}))
    assert 'cd -- "$(git rev-parse --show-toplevel)"' in local


def test_builds_of_torch_need_their_index() -> None:
    """A CUDA build of torch needs its own package index, because PyPI lacks it."""
    first = reproduction.requirements(environment()).splitlines()[0]
    assert first == "--extra-index-url https://download.pytorch.org/whl/cu126"


def test_a_pushed_commit_without_changes_can_be_queued() -> None:
    """A pushed commit without changes is queued with its command, whose braces are escaped;
    other states are rejected with the reasons.
    """
    assert reproduction.obstacles(environment()) == []
    assert reproduction.command_of(environment()) == {
        "line": "python train.py --name 'it'\"'\"'s {{a}}'",
        "folder": "src",
        "git": "https://host/a.git",
        "commit": "c0ffee1",
        "patch": environment()["diff"] or "",
    }
    changed: Any = environment({"is_dirty": True}) | {"diff": "+1"}
    assert reproduction.obstacles(changed) == []
    assert reproduction.command_of(changed)["patch"] == "+1"
    git = {"remote": "git@host:a.git", "is_pushed": False, "is_dirty": True, "error": "no"}
    unknown: Any = environment(git | {"changed": ["a"]}, command=["***"]) | {"diff": None}
    assert len(reproduction.obstacles(unknown)) == 5
    assert reproduction.obstacles(environment() | {"git": None}) == ["no commit is recorded"]


def test_a_run_of_a_recipe_is_submitted_again() -> None:
    """A recipe's run is repeated by submitting it, because its process belongs to the worker."""
    file = {"path": "/srv/mine.py", "sha256": "aa", "size_bytes": 6, "is_cut": False}
    again = "halfstep run submit mine --set training.steps=70"
    text = reproduction.script(
        7, environment(submit_command=again, file=file, has_other_source=True)
    )
    assert text.splitlines() == [
        "# Run 7, attempt 1 on gpu-7",
        "# Its recipe was /srv/mine.py at commit c0ffee1.",
        "# The recipe's source has changed since; `--json` has the earlier one.",
        again,
    ]
