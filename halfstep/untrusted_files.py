"""Files in a folder that a run can write, opened without following a link.

Each function takes the folder as `root`, whose parents no run can write, and a path in it. The path
is resolved from an open descriptor of the root: a component that is a link, or leads out of the
root, raises OSError, whatever the run changes meanwhile. Only regular files are opened, so a named
pipe does not make the reader wait.
"""

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPENAT2 = 437  # the same on every architecture
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 2, 4, 8  # linux/openat2.h
#: Errors of a kernel, or of a container's filter, without openat2.
WITHOUT_OPENAT2 = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
#: Errors of a path that is a link, leads out of the root, or is no regular file.
REFUSED = (
    *(errno.ELOOP, errno.EXDEV, errno.ENOTDIR, errno.EINVAL, errno.EISDIR, errno.ENXIO),
    *(errno.EACCES, errno.ENAMETOOLONG),
)
CHUNK_BYTES = 1 << 20


class _How(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_file(root: Path, path: str) -> BinaryIO:
    """Open a regular file for reading. Raises OSError."""
    with _open(root) as folder:
        descriptor = _open_beneath(folder, path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", f"{root}/{path}")
    return os.fdopen(descriptor, "rb")


def read(root: Path, path: str, most_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError, also if it is longer."""
    with open_file(root, path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        text = f"longer than {most_bytes:,} bytes"
        raise OSError(errno.EFBIG, text, f"{root}/{path}")
    return content


def write(root: Path, path: str, content: bytes) -> None:
    """Replace a file as a whole. Raises OSError."""
    with _parent(root, path) as (folder, name):
        partial = f".{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(partial, flags, 0o644, dir_fd=folder), "wb") as file:
                file.write(content)
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise


def names(root: Path, path: str = "") -> list[str]:
    """Return the names in a folder, [] if it does not exist. Raises OSError."""
    try:
        with _folder(root, path) as folder:
            return os.listdir(folder)  # noqa: PTH208 - it has no path
    except FileNotFoundError:
        return []


def exists(root: Path, path: str) -> bool:
    """Return whether a path is a file, a folder or a link."""
    return bool(_type(root, path))


def is_file(root: Path, path: str) -> bool:
    """Return whether a path is a regular file."""
    return _type(root, path) == stat.S_IFREG


def is_folder(root: Path, path: str) -> bool:
    """Return whether a path is a folder."""
    return _type(root, path) == stat.S_IFDIR


def make_folder(root: Path, path: str, mode: int = 0o700) -> None:
    """Create a folder in the root unless it is there. Raises OSError if something else is."""
    with _parent(root, path) as (folder, name):
        with suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=folder)
        os.close(_open_beneath(folder, name, FOLDER))


def delete(root: Path, path: str) -> None:
    """Delete a file, link or whole folder, if it exists. Raises OSError."""
    try:
        with _parent(root, path) as (folder, name):
            is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
            if is_folder:
                _delete_folder(folder, name)
            else:
                os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def rename(root: Path, path: str, to: str) -> None:
    """Rename a file or folder within the root. Raises OSError."""
    with _parent(root, path) as (before, name), _parent(root, to) as (after, new):
        os.rename(name, new, src_dir_fd=before, dst_dir_fd=after)


def take_over(root: Path, path: str, target: Path, size_bytes: int | None = None) -> None:
    """Give a regular file another name outside of the root, which replaces what is there.

    Both names are of the same content; between file systems it is copied. Raises OSError, and
    ValueError if its size is not `size_bytes`.
    """
    partial = target.with_name(f".{secrets.token_hex(8)}")
    with open_file(root, path) as file:
        _check_size(file, size_bytes)
        try:
            if _is_same(file, target):
                return
            _link(file, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def copy_verified(root: Path, path: str, target: Path, sha256: str, size_bytes: int) -> None:
    """Copy a regular file out of the root, so that the run cannot change it, and verify the copy.

    Raises OSError, ValueError if its content is another.
    """
    partial, digest = target.with_name(f".{secrets.token_hex(8)}"), hashlib.sha256()
    with open_file(root, path) as file:
        _check_size(file, size_bytes)
        try:
            with partial.open("xb") as copy:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    copy.write(chunk)
                _check_size(copy, size_bytes)
            if digest.hexdigest() != sha256:
                raise ValueError(f"its SHA-256 is {digest.hexdigest()}, not {sha256}")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def give(root: Path, user: int, earlier: range) -> None:
    """Make a user the owner of the root and of all in it.

    A file with several names changes its owner only if that is one of `earlier` users: another
    name of it may belong to another user. Raises OSError.
    """
    with _open(root) as folder:
        try:
            for _place, folders, files, descriptor in os.fwalk(dir_fd=folder):
                for name in (*folders, *files):
                    _give(name, descriptor, user, earlier)
        except RecursionError as error:
            text = "its folders are nested too deeply"
            raise OSError(errno.ENAMETOOLONG, text, str(root)) from error
        os.fchown(folder, user, user)
        os.fchmod(folder, 0o2700)


def _give(name: str, folder: int, user: int, earlier: range) -> None:
    found = os.lstat(name, dir_fd=folder)
    if stat.S_ISDIR(found.st_mode) or found.st_nlink == 1 or found.st_uid in earlier:
        os.chown(name, user, user, dir_fd=folder, follow_symlinks=False)


def _check_size(file: BinaryIO, size_bytes: int | None) -> None:
    file.flush()
    size = os.fstat(file.fileno()).st_size
    if size_bytes not in (None, size):
        raise ValueError(f"it has {size:,} bytes, not {size_bytes:,}")


def _delete_folder(folder: int, name: str) -> None:
    """Delete a folder of any depth, which Python's recursive functions cannot."""
    place = f"/proc/self/fd/{folder}/{name}"
    ended = subprocess.run(
        ["rm", "-rf", "--", place], pass_fds=[folder], stderr=subprocess.PIPE, check=False
    )
    if ended.returncode:
        raise OSError(errno.EIO, ended.stderr.decode(errors="replace")[-500:].strip())


@contextmanager
def _open(root: Path) -> Iterator[int]:
    descriptor = os.open(root, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _folder(root: Path, path: str) -> Iterator[int]:
    """Open a folder in the root, or the root itself for an empty path."""
    with _open(root) as above:
        descriptor = _open_beneath(above, path, FOLDER) if path else os.dup(above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _parent(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """Open the folder that contains a path; yield its descriptor and the last name."""
    above, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "not a file name", f"{root}/{path}")
    with _folder(root, above) as folder:
        yield folder, name


def _type(root: Path, path: str) -> int:
    try:
        with _parent(root, path) as (folder, name):
            return stat.S_IFMT(os.lstat(name, dir_fd=folder).st_mode)
    except OSError:
        return 0


def _open_beneath(folder: int, path: str, flags: int) -> int:
    if sys.platform != "linux":
        return _open_by_component(folder, path, flags)
    how = _How(
        flags | os.O_NOFOLLOW | os.O_CLOEXEC,
        0,
        RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    )
    libc = ctypes.CDLL(None, use_errno=True)
    words = (OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    descriptor = int(libc.syscall(*words))
    if descriptor >= 0:
        return descriptor
    number = ctypes.get_errno()
    if number in WITHOUT_OPENAT2:
        return _open_by_component(folder, path, flags)
    raise OSError(number, os.strerror(number), path)


def _open_by_component(folder: int, path: str, flags: int) -> int:
    """Open a path one component at a time, on a kernel without openat2."""
    *above, name = path.split("/")
    if any(part in ("", ".", "..") for part in (*above, name)):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    here = os.dup(folder)
    try:
        for part in above:
            below = os.open(part, FOLDER, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def _is_same(file: BinaryIO, target: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), target.lstat())
    except FileNotFoundError:
        return False


def _link(file: BinaryIO, target: Path) -> None:
    """Link an open file to a new path, or copy it where links are not possible."""
    with _open(Path("/proc/self/fd")) as opened:
        try:
            os.link(str(file.fileno()), target, src_dir_fd=opened, follow_symlinks=True)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            with target.open("xb") as copy:
                shutil.copyfileobj(file, copy, CHUNK_BYTES)
