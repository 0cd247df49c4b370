"""Creates links and repositories that lead outside, where the service may read sources."""

# ruff: noqa: B023, PTH101
import os
import subprocess
from pathlib import Path

from common import folders_with_links, outcome, plan, report

wanted = plan()
folder = next(iter(folders_with_links()), Path.cwd())
made: dict[str, list[str]] = {"sources": [], "folders": []}
for number, target in enumerate(wanted["targets"]):
    link = folder / f"x{number}.py"
    if outcome(lambda: link.symlink_to(target)) == "done":
        made["sources"].append(link.name)


def repository(name: str) -> Path:
    """Make a repository with a commit."""
    place = folder / name
    place.mkdir()
    git = ["git", "-C", str(place), "-c", "user.name=m", "-c", "user.email=m@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (place / "tracked.txt").write_text("ours\n")
    for each in wanted["names"]:
        (place / each).write_text("ours\n")
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "m"], check=True)
    return place


def redirected() -> None:
    """Make a .git file that points to another user's repository."""
    place = folder / "redirected"
    place.mkdir()
    (place / "tracked.txt").write_text("ours\n")
    (place / ".git").write_text(f"gitdir: {wanted['victim']}/.git\n")


def linked() -> None:
    """Make .git a link to another user's repository."""
    place = folder / "linked"
    place.mkdir()
    (place / "tracked.txt").write_text("ours\n")
    (place / ".git").symlink_to(f"{wanted['victim']}/.git")


def elsewhere() -> None:
    """Configure a repository whose working tree is above the folder."""
    place = repository("elsewhere")
    with (place / ".git/config").open("a") as file:
        file.write(f"\tworktree = {wanted['victim']}\n")


def outer() -> None:
    """Make a working tree that is a link to a folder with files of the same names."""
    place = repository("outer")
    for each in (*wanted["names"], "tracked.txt"):
        (place / each).unlink()
    with (place / ".git/config").open("a") as file:
        file.write(f"\tworktree = {wanted['data']}\n")


def borrowed() -> None:
    """Make a repository that uses another repository's objects and HEAD."""
    place = repository("borrowed")
    (place / ".git/objects/info/alternates").write_text(f"{wanted['victim']}/.git/objects\n")
    (place / ".git/HEAD").write_text(f"{wanted['head']}\n")


def common_folder() -> None:
    """Make a linked working tree whose common folder is another user's repository."""
    place = folder / "common"
    inner = folder / "common.git"
    for each in (place, inner):
        each.mkdir()
    (place / ".git").write_text(f"gitdir: {inner}\n")
    (inner / "HEAD").write_text(f"{wanted['head']}\n")
    (inner / "commondir").write_text(f"{wanted['victim']}/.git\n")
    (inner / "gitdir").write_text(f"{place}/.git\n")


def included() -> None:
    """Make a configuration that includes a secret, whose first line git may print."""
    place = repository("included")
    with (place / ".git/config").open("a") as file:
        file.write(f"[include]\n\tpath = {wanted['data']}/secrets.key\n")


def excluded() -> None:
    """Use secrets as git's list of exclusions, as HEAD and as an index."""
    place = repository("excluded")
    for name in ("info/exclude", "HEAD", "index"):
        (place / ".git" / name).unlink(missing_ok=True)
        (place / ".git" / name).symlink_to(f"{wanted['data']}/secrets.key")


for make in (
    redirected,
    linked,
    elsewhere,
    outer,
    borrowed,
    common_folder,
    included,
    excluded,
):
    how = outcome(make)
    if how == "done":
        made["folders"].append({"common_folder": "common"}.get(make.__name__, make.__name__))
    else:
        print(make.__name__, how)
os.chmod(folder, 0o755)
report({"folder": str(folder)} | made)
