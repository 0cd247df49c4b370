"""Refuge of a run: a folder in TMPDIR, or in memory, for files that its own folder cannot hold.

Used while the disk is full or read-only. Its name follows from the run's folder, so that the
uploader and later attempts on this machine find it.
"""

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from halfstep.telemetry import spool

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder within is this user's only


def open_refuge(folder: Path) -> Path:
    """Return the refuge of a run's folder, created if necessary. Raises OSError."""
    *others, last = _places(folder)
    for place in others:
        with suppress(OSError):
            return _create(place)
    return _create(last)


def within(folder: Path, name: str | Path) -> Path:
    """Return the path of a run's file: in its folder, or else in its refuge."""
    places = [folder, *filter(_is_own, _places(folder))]
    return next((place / name for place in places if (place / name).exists()), folder / name)


def spool_of(files: Path, attempt: int) -> list[tuple[int, Path]]:
    """Return the sequence numbers and files of an attempt's spool, also those in the refuge."""
    found: dict[int, Path] = {}
    for place in [*filter(_is_own, reversed(_places(files.parent))), files.parent]:
        found |= spool.spool_of(place / files.name, attempt)
    return sorted(found.items())


def restore(folder: Path) -> None:
    """Copy the files of the refuge into the run's folder, as far as there is space again."""
    for place in filter(_is_own, _places(folder)):
        for path in sorted(place.rglob("*")):
            target = folder / path.relative_to(place)
            if path.is_dir() or target.exists():
                continue
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, temporary)
                temporary.replace(target)
            except OSError:  # still full: the uploader finds it in the refuge
                with suppress(OSError):
                    temporary.unlink()


def _places(folder: Path) -> tuple[Path, Path]:
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    name = f"halfstep-{os.getuid()}-{digest}"
    return Path(os.environ.get("TMPDIR") or "/tmp") / name, IN_MEMORY / name  # noqa: S108


def _create(place: Path) -> Path:
    """Create a folder of this user, in which a file can be written. Raises OSError."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(place):
        raise PermissionError(f"{place} is not a folder of this user")
    probe = place / f".{os.getpid()}"
    try:
        probe.write_bytes(bytes(4096))
    except OSError:
        probe.unlink(missing_ok=True)
        with suppress(OSError):  # an earlier attempt has files there
            place.rmdir()
        raise
    probe.unlink()
    return place


def _is_own(place: Path) -> bool:
    """Return whether a path is a folder of this user, to which no other may write."""
    with suppress(OSError):
        found = place.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
