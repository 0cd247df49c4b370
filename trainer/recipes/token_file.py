"""A text's tokens in a file, made once for each text and tokenizer, and mapped: none are in memory.

They lie in the worker's data folder, cache/tokens/<SHA-256 of what they are made of>.tokens, as
int32 in the order of the text. What no run has read for a month is deleted by the next that writes.
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
PIECES_AT_ONCE = 256  # that the tokenizer goes through in parallel
KEPT_SECONDS = 30 * 86_400.0
ENDING = ".tokens"

#: Makes tokens of pieces: a list for each, ends of documents included.
Encode = Callable[[list[Piece]], list[list[int]]]


def tokens_of(
    pieces: Callable[[], Iterable[Piece]], encode: Encode, made_by: str
) -> NDArray[np.int32]:
    """Return all tokens of a text, mapped.

    pieces: begins to read the text anew; it is read once to know what it is, and again where its
    tokens are to be made.  made_by: whatever else decides which tokens they are.
    """
    path = folder() / f"{_sha256(pieces(), made_by)}{ENDING}"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of a run on several devices one makes them, and the others wait.
    with folder_lock.held(path.with_suffix(".lock")):
        if not path.exists():
            _write(path, pieces(), encode)
            _delete_old(path)
        os.utime(path)
        os.utime(path.with_suffix(".lock"))
    if not path.stat().st_size:  # which cannot be mapped
        return np.zeros(0, TYPE)
    return np.memmap(path, TYPE, mode="r")


def folder() -> Path:
    """Return where they lie: in the folder that the workers' own settings name."""
    return Path(os.environ.get("HALFSTEP_DATA", "data")).resolve() / "cache" / "tokens"


def _sha256(pieces: Iterable[Piece], made_by: str) -> str:
    digest = hashlib.sha256(made_by.encode())
    for piece in pieces:
        text = piece.text.encode(errors="surrogatepass")
        digest.update(f"\n{len(text)} {piece.is_last}\n".encode() + text)
    return digest.hexdigest()


def _write(path: Path, pieces: Iterable[Piece], encode: Encode) -> None:
    """Write all of them, or nothing."""
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
    latest = time.time() - KEPT_SECONDS
    for path in written.parent.iterdir():  # halves of what was killed among them
        with suppress(OSError):  # whoever has it mapped keeps it
            if path.stat().st_mtime < latest:
                path.unlink()
