"""Object store of checkpoints and artifacts: the data folder by default, or a bucket."""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

import obstore
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store, from_url

from db.errors import Invalid, StorageFull
from db.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

#: Size of an upload's parts, and concurrent ones: 64 MiB of memory for a file of any size.
PART_BYTES, PARTS_AT_ONCE = 16 * 2**20, 4
#: Limit of S3; the parts of a file above 156 GiB are larger.
MOST_PARTS = 10_000
#: Page size of a listing, S3's maximum.
PAGE_FILES = 1000
#: Timeout of a request without a response; one part must arrive within it.
SILENCE_SECONDS = 30.0
#: How long a server or a worker that starts waits for a bucket.
CHECK_SECONDS = 5.0


def open_store(settings: Settings, *, retry_seconds: float = 180.0) -> ObjectStore:
    """Open the store that HALFSTEP_STORAGE_URL names. Raises Invalid.

    retry_seconds: how long to retry requests that a bucket does not answer.
    """
    if not settings.storage_url:
        return LocalStore(settings.data, mkdir=True)
    try:
        return _open_bucket(settings.storage_url, retry_seconds)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise Invalid({"HALFSTEP_STORAGE_URL": str(error)}) from error


def check_store(settings: Settings) -> None:
    """Check that the bucket exists and can be listed. Raises Invalid."""
    if not settings.storage_url:
        return
    store = open_store(settings, retry_seconds=CHECK_SECONDS)
    try:
        next(iter(obstore.list(store, prefix="runs")), None)
    except obstore.exceptions.BaseError as error:
        text = f"the bucket cannot be listed: {why(error)}"
        raise Invalid({"HALFSTEP_STORAGE_URL": text}) from error


def why(error: Exception) -> str:
    """Return the error of a store on one line: its code and message if the response has them."""
    match = re.search(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>", str(error))
    return ": ".join(match.groups()) if match else str(error).partition("\n")[0]


def is_full(error: BaseException) -> bool:
    """Return whether an error of a disk or a store means that no space is left."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def storage_full(folder: Path, needed: int) -> StorageFull:
    """Return the error of a file that does not fit on the disk of a folder, with sizes in bytes."""
    free = shutil.disk_usage(folder).free
    text = f"The disk that stores files is full: {needed:,} bytes are needed, {free:,} are free."
    return StorageFull(f"{text} Ask the operator to free space, then send the file again.")


def put_file(store: ObjectStore, key: str, path: Path) -> None:
    """Copy a file into the store, unless it is already there because the store is a folder.

    The file becomes visible once it is complete. After an error its parts are deleted; parts of a
    killed process stay until the bucket's own rule deletes them.
    """
    if not is_in_place(store, path, key):
        part_bytes = max(PART_BYTES, -(-path.stat().st_size // MOST_PARTS))
        with _no_bucket_as_outage():
            obstore.put(store, key, path, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)


def is_in_place(store: ObjectStore, path: Path, key: str = "") -> bool:
    """Return whether this path is the store's location of a key, or of the whole store."""
    folder = store.prefix if isinstance(store, LocalStore) else None
    return folder is not None and Path(folder, key) == path


def sign_address(store: ObjectStore, key: str, *, seconds: float) -> str | None:
    """Return a presigned URL of a file, valid for so long; None if the store is no bucket."""
    if isinstance(store, S3Store | GCSStore | AzureStore):
        return obstore.sign(store, "GET", key, timedelta(seconds=seconds))
    return None


def is_plain(folder: Path, key: str) -> bool:
    """Return whether a key stays within this folder: no parent references and no symlinks.

    The first part may be a symlink, for installations that store all runs elsewhere.
    """
    top, *parts = key.split("/")
    if any(part in ("", ".", "..") for part in (top, *parts)):
        return False
    root = os.path.realpath(folder / top)
    return os.path.realpath(Path(root, *parts)) == os.path.join(root, *parts)  # noqa: PTH118


def is_own(store: ObjectStore, key: str) -> bool:
    """Return whether a key is safe to serve, even if a recipe has put symlinks into its folder."""
    folder = store.prefix if isinstance(store, LocalStore) else None
    return is_plain(Path(folder or os.devnull), key)


def delete_file(store: ObjectStore, key: str) -> None:
    """Delete a file from the store, if it exists."""
    with suppress(FileNotFoundError):
        obstore.delete(store, key)


def delete_files(store: ObjectStore, keys: Collection[str]) -> None:
    """Delete files from the store; in a bucket with concurrent requests, one per file."""
    if isinstance(store, LocalStore):  # its bulk delete stops at the first missing file
        for key in keys:
            delete_file(store, key)
    elif keys:
        obstore.delete(store, list(keys))


def get_file(store: ObjectStore, key: str, path: Path, *, sha256: str) -> None:
    """Fetch a file from the store to a path, unless it exists, and verify its SHA-256.

    Raises FileNotFoundError if the store does not have it, ValueError if the SHA-256 differs.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _no_bucket_as_outage():
            content = obstore.get(store, key)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            for chunk in content:
                file.write(chunk)
        temporary.rename(path)
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ValueError(f"{key} is damaged: its SHA-256 is {actual}, recorded was {sha256}")


def _open_bucket(url: str, retry_seconds: float) -> ObjectStore:
    # The time limit decides when to stop, not the number of retries.
    retry: RetryConfig = {"retry_timeout": timedelta(seconds=retry_seconds), "max_retries": 1000}
    client: ClientConfig = {
        # The default of 30 seconds would also end a large transfer that makes progress.
        "timeout": timedelta(days=1),
        "read_timeout": timedelta(seconds=max(SILENCE_SECONDS, retry_seconds)),
    }
    if obstore.parse_scheme(url) != "s3":
        return from_url(url, retry_config=retry, client_options=client)
    # obstore reads this variable only if no client options are given.
    client["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    # obstore cannot parse the bulk-delete response of MinIO and its forks.
    return from_url(url, retry_config=retry, client_options=client, disable_bulk_delete=True)


@contextmanager
def _no_bucket_as_outage() -> Iterator[None]:
    """Turn a missing bucket into an outage, which is retried, instead of a missing file."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" not in str(error):
            raise
        raise obstore.exceptions.GenericError(why(error)) from error


def sha256_of(store: ObjectStore, key: str, copy: IO[bytes] | None = None) -> str:
    """Return the SHA-256 of a file's content. copy: receives the content."""
    digest = hashlib.sha256()
    for chunk in obstore.get(store, key):
        digest.update(chunk)
        if copy:
            copy.write(chunk)
    return digest.hexdigest()
