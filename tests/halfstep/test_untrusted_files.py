"""In a folder whose owner is hostile nothing outside of it is read or changed."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halfstep import untrusted_files

SECRET = b"secret"
MOST = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's folder, next to a folder of the service."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "key").write_bytes(SECRET)
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "run" / "sub" / "file").write_bytes(b"own")
    return tmp_path / "run"


@pytest.fixture(params=["openat2", "by component"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with and without openat2."""
    if request.param == "by component":
        monkeypatch.setattr(untrusted_files, "OPENAT2", 100_000)
    return str(request.param)


PATHS = ["link", "linked/key", "sub/link", "../service/key", "/etc/passwd", "sub/../../service/key"]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out_of_the_root(root: Path, kernel: str, path: str) -> None:
    """Neither a link nor a linked folder, a parent reference or an absolute path is opened."""
    (root / "link").symlink_to(root.parent / "service" / "key")
    (root / "linked").symlink_to(root.parent / "service")
    (root / "sub" / "link").symlink_to("../../service/key")
    with pytest.raises(OSError, match=r".") as raised:
        untrusted_files.open_file(root, path)
    assert raised.value.errno in untrusted_files.REFUSED
    assert untrusted_files.read(root, "sub/file", MOST) == b"own"


def test_a_linked_root_is_not_followed(root: Path) -> None:
    """A root folder that was replaced by a link is not followed."""
    (root / "spool").symlink_to(root.parent / "service")
    for call in (untrusted_files.names, lambda path: untrusted_files.open_file(path, "key")):
        with pytest.raises(NotADirectoryError):
            call(root / "spool")


def test_only_regular_files_are_opened(root: Path, kernel: str) -> None:
    """A named pipe does not block the reader, and a folder is not opened as a file."""
    os.mkfifo(root / "pipe")
    for name in ("pipe", "sub"):
        with pytest.raises(OSError, match=r".") as raised:
            untrusted_files.open_file(root, name)
        assert raised.value.errno in untrusted_files.REFUSED
        assert not untrusted_files.is_file(root, name)


def test_a_long_file_is_refused(root: Path) -> None:
    """A file above the reader's limit is refused."""
    with pytest.raises(OSError, match="longer than 2 bytes"):
        untrusted_files.read(root, "sub/file", 2)


def test_writing_replaces_a_link_instead_of_its_target(root: Path) -> None:
    """Writing to a link replaces the link and not its target; a linked folder is refused."""
    key = root.parent / "service" / "key"
    (root / "link").symlink_to(key)
    untrusted_files.write(root, "link", b"new")
    assert (key.read_bytes(), (root / "link").read_bytes()) == (SECRET, b"new")
    (root / "linked").symlink_to(key.parent)
    with pytest.raises(OSError, match=r"."):
        untrusted_files.write(root, "linked/key", b"new")
    assert key.read_bytes() == SECRET


def test_deleting_a_folder_deletes_links_but_not_their_targets(root: Path) -> None:
    """Deleting a folder deletes links in it, but not their targets."""
    (root / "sub" / "linked").symlink_to(root.parent / "service")
    untrusted_files.delete(root, "sub")
    untrusted_files.delete(root, "sub")
    assert (root.parent / "service" / "key").read_bytes() == SECRET
    assert not untrusted_files.exists(root, "sub")


def test_a_file_is_taken_over_once(root: Path, tmp_path: Path) -> None:
    """A file is adopted as a hard link, and a newer file replaces an earlier one."""
    target = tmp_path / "service" / "taken"
    for content in (b"first", b"second"):
        (root / "file").unlink(missing_ok=True)
        (root / "file").write_bytes(content)
        for _ in range(2):
            untrusted_files.take_over(root, "file", target)
        assert target.samefile(root / "file")
        assert target.read_bytes() == content
    assert sorted(each.name for each in target.parent.iterdir()) == ["key", "taken"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")
def test_a_file_with_another_name_keeps_its_owner(root: Path) -> None:
    """A hard link to another user's file keeps its owner; an earlier run user's file does not."""
    key = root.parent / "service" / "key"
    os.link(key, root / "hard")
    os.link(root / "sub" / "file", root.parent / "checkpoint")
    os.chown(root / "sub" / "file", 61000, 61000)
    (root / "link").symlink_to(key)
    untrusted_files.give(root, 61001, range(61000, 61002))
    assert key.stat().st_uid == 0
    assert (root / "sub" / "file").stat().st_uid == 61001
    assert (root / "link").lstat().st_uid == 61001
    assert root.stat().st_uid == 61001


@contextmanager
def swapping(path: Path, target: Path) -> Iterator[None]:
    """Replace a folder by a link and back repeatedly."""
    done = threading.Event()
    real, link = path.with_name("real"), path.with_name("swapped")
    link.symlink_to(target)

    def swap() -> None:
        while not done.is_set():
            path.rename(real)
            link.rename(path)
            path.rename(link)
            real.rename(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_swapped_folder_is_never_followed(root: Path, kernel: str) -> None:
    """None of 3,000 reads and deletions, while a folder is swapped, reaches the linked one."""
    (root / "sub" / "key").write_bytes(b"own")
    with swapping(root / "sub", root.parent / "service"):
        for _ in range(3000):
            try:
                assert untrusted_files.read(root, "sub/key", MOST) == b"own"
            except OSError:
                continue
        for number in range(1000):
            try:
                untrusted_files.write(root, "sub/other", b"%d" % number)
                untrusted_files.delete(root, "sub/other")
            except OSError:
                continue
    assert [each.name for each in (root.parent / "service").iterdir()] == ["key"]


def test_folders_of_any_depth_are_deleted(root: Path) -> None:
    """Folders deeper than Python's recursion limit are deleted."""
    here = os.open(root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    untrusted_files.delete(root, "d")
    assert not untrusted_files.exists(root, "d")


def test_a_copy_is_verified(root: Path, tmp_path: Path) -> None:
    """A copy whose content or size differs from what the run states stays in the run's folder."""
    sha256, target = hashlib.sha256(b"own").hexdigest(), tmp_path / "service" / "copy"
    for stated, size in ((sha256, 4), ("0" * 64, 3)):
        with pytest.raises(ValueError, match=r"its SHA-256 is|bytes, not"):
            untrusted_files.copy_verified(root, "sub/file", target, stated, size)
        assert not target.exists()
    untrusted_files.copy_verified(root, "sub/file", target, sha256, 3)
    assert not target.samefile(root / "sub" / "file")
    with pytest.raises(ValueError, match="bytes, not"):
        untrusted_files.take_over(root, "sub/file", target, 4)
