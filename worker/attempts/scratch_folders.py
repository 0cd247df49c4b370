"""Folders of a run on this machine: one that the service writes, and one that the run writes."""

import errno
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from db.settings import Settings
from halfstep import untrusted_files
from halfstep.telemetry.events import File

logger = logging.getLogger(__name__)

NODE = re.compile(r"node-[1-9][0-9]{0,5}")
#: Folders of the files that are taken over; the last one of files by their hash.
BLOBS = "blobs"
SAVED = ("checkpoints", "artifacts", BLOBS)
#: What stays in the service's folder of what runs wrote there in earlier versions.
KEPT = (*SAVED, "log", "incoming")


def make_folders(settings: Settings, run_id: int, node: int = 0) -> tuple[Path, Path]:
    """Create a run's own folder and its scratch folder, and return them.

    What earlier versions had in one folder is divided. Raises OSError.
    """
    folder, scratch = settings.run_folder(run_id, node), settings.scratch_folder(run_id, node)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # also if an earlier version created it
    if not scratch.exists():
        partial = scratch.with_name(f".{scratch.name}")
        partial.mkdir(parents=True, exist_ok=True)
        _divide(folder, partial)
        try:
            partial.rename(scratch)  # the last step: an interrupted division continues
        except OSError:
            if not scratch.exists():  # of another worker that divides the same folder
                raise
    scratch.chmod(0o700)
    return folder, scratch


def take_over(scratch: Path, folder: Path, file: File) -> bool:
    """Take a file that a run saved over into its own folder; return whether it is there.

    Raises ValueError for anything but a plain file with the content that the run states.
    """
    path, is_blob = folder / file.path, file.path.startswith(f"{BLOBS}/")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_blob:  # stored by its hash, for others too
            untrusted_files.copy_verified(scratch, file.path, path, file.sha256, file.size_bytes)
        else:
            untrusted_files.take_over(scratch, file.path, path, file.size_bytes)
    except FileNotFoundError:  # taken over before a crash, if it is that file
        return path.is_file() and (not is_blob or _is_content(path, file))
    except OSError as error:
        if error.errno not in untrusted_files.REFUSED:
            raise
        text = f"{file.path} is a link, or in a linked folder; allowed: a plain file"
        raise ValueError(text) from error
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    return True


def _is_content(path: Path, file: File) -> bool:
    """Return whether a file of the service has the size and the SHA-256 that a run states."""
    with path.open("rb") as content:
        is_same = hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        return is_same and content.tell() == file.size_bytes


def divide_all(settings: Settings, active: Collection[int]) -> None:
    """Create the scratch folders of all runs on this machine but those with an attempt.

    That may have a supervisor of an earlier version. A folder that cannot be divided is logged, and
    keeps no other.
    """
    runs = settings.run_folder(0).parent
    names = [folder.name for folder in runs.iterdir()] if runs.is_dir() else []
    here = {int(name) for name in names if name.isdecimal()}
    for run_id in here - set(active):
        try:
            for node in (0, *_nodes(settings.run_folder(run_id))):
                if not settings.scratch_folder(run_id, node).exists():
                    make_folders(settings, run_id, node)
        except Exception as error:
            words = "the folder of an earlier version cannot be split: %s"
            logger.error(words, error, extra={"run": run_id})


def _nodes(folder: Path) -> list[int]:
    names = filter(NODE.fullmatch, untrusted_files.names(folder))
    nodes = [name for name in names if untrusted_files.is_folder(folder, name)]
    return [int(name.removeprefix("node-")) for name in nodes]


def _divide(folder: Path, scratch: Path) -> None:
    """Move what a run wrote in its folder into its scratch folder; delete links.

    Checkpoints are in both, for a rollback.
    """
    untrusted_files.delete(folder, "tmp")
    for name in untrusted_files.names(folder):
        if untrusted_files.is_folder(folder, name):
            if name in KEPT or name.startswith(("quarantine-", "node-")):
                _delete_links(folder / name)
            else:
                _move(folder / name, scratch / name)
        elif not untrusted_files.is_file(folder, name):
            untrusted_files.delete(folder, name)
    _share(folder / "checkpoints", scratch / "checkpoints")


def _move(folder: Path, target: Path) -> None:
    """Rename a folder; between two disks copy it, with its links as they are."""
    if target.exists():  # of an interrupted copy
        shutil.rmtree(target)
    try:
        folder.rename(target)
    except OSError:
        shutil.copytree(folder, target, symlinks=True)
        shutil.rmtree(folder)


def _delete_links(folder: Path) -> None:
    """Delete what is neither a folder nor a regular file."""
    for _place, folders, files, descriptor in os.fwalk(folder):
        for name in (*folders, *files):
            mode = os.lstat(name, dir_fd=descriptor).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                os.unlink(name, dir_fd=descriptor)


def _share(folder: Path, target: Path) -> None:
    """Give each file of a folder a second name in another one."""
    for place, _folders, files in os.walk(folder):
        other = target / Path(place).relative_to(folder)
        for name in files:
            other.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                _link_or_copy(Path(place, name), other / name)


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(file, target, follow_symlinks=False)
