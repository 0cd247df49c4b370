"""Cache of a text's tokens in memory-mapped files, one per text and tokenizer.

They are in the worker's data folder, cache/tokens/<SHA-256 of the inputs>.tokens, as int32 in the
order of the text. Files that no run has read for a month are deleted when another is written.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray

from halfstep.telemetry import folder_lock
from trainer.recipes.corpus import Piece

TYPE = np.dtype("<i4")
PIECES_AT_ONCE = 256  # that the tokenizer processes in parallel
RETENTION_SECONDS = 30 * 86_400.0
ENDING = ".tokens"

#: Tokenizes pieces: returns a list for each, with tokens for the ends of documents.
Encode = Callable[[list[Piece]], list[list[int]]]


def tokens_of(
    pieces: Callable[[], Iterable[Piece]], encode: Encode, made_by: str
) -> NDArray[np.int32]:
    """Return all tokens of a text, memory-mapped.

    pieces: starts a new pass over the text; one pass computes its hash, another one its tokens if
    they are not cached.  made_by: other inputs that determine the tokens.
    """
    path = folder() / f"{_sha256(pieces(), made_by)}{ENDING}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a run on several devices one process writes them, and the others wait.
    with folder_lock.held(path.with_suffix(".lock")):
        if not path.exists():
            _write(path, pieces(), encode)
            _delete_old(path)
        os.utime(path)
        os.utime(path.with_suffix(".lock"))
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, TYPE)
    return np.memmap(path, TYPE, mode="r")


def folder() -> Path:
    """Return the cache's folder, in the workers' data folder."""
    return Path(os.environ.get("HALFSTEP_DATA", "data")).resolve() / "cache" / "tokens"


def _sha256(pieces: Iterable[Piece], made_by: str) -> str:
    digest = hashlib.sha256(made_by.encode())
    for piece in pieces:
        text = piece.text.encode(errors="surrogatepass")
        digest.update(f"\n{len(text)} {piece.is_last}\n".encode() + text)
    return digest.hexdigest()


def _write(path: Path, pieces: Iterable[Piece], encode: Encode) -> None:
    """Write the tokens atomically."""
    pieces = iter(pieces)
    with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            while some := list(islice(pieces, PIECES_AT_ONCE)):
                for tokens in encode(some):
                    file.write(np.array(tokens, TYPE).data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _delete_old(written: Path) -> None:
    latest = time.time() - RETENTION_SECONDS
    for path in written.parent.iterdir():  # includes partial files of killed processes
        with suppress(OSError):  # a process that has mapped a file keeps its data
            if path.stat().st_mtime < latest:
                path.unlink()
