"""Environment of each attempt of a run, recorded for reproduction."""

import zlib
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from db.tables import RunEnvironment
from halfstep.telemetry.plain_json import JsonObject

#: Maximum stored size of a source or a diff, in UTF-8 bytes.
LONGEST_BYTES = 256_000


class Texts(NamedTuple):
    """Source of the recipe or script, and the git diff."""

    source: str | None
    diff: str | None


def record(session: Session, run_id: int, attempt: int, content: JsonObject, texts: Texts) -> None:
    """Store the environment of an attempt. The caller must hold the run."""
    session.merge(
        RunEnvironment(
            run_id=run_id,
            attempt=attempt,
            content=content,
            source=_packed(texts.source),
            diff=_packed(texts.diff),
        )
    )
    session.flush()


def newest(session: Session, run_id: int) -> RunEnvironment | None:
    """Return the environment of the latest attempt, without its texts."""
    query = (
        select(RunEnvironment)
        .options(defer(RunEnvironment.source), defer(RunEnvironment.diff))
        .where(RunEnvironment.run_id == run_id)
        .order_by(RunEnvironment.attempt.desc())
        .limit(1)
    )
    return session.scalar(query)


def texts(environment: RunEnvironment) -> Texts:
    """Return the texts of an environment."""
    return Texts(_unpacked(environment.source), _unpacked(environment.diff))


def _packed(text: str | None) -> bytes | None:
    if text is None:
        return None
    # A character that the limit splits is dropped.
    stored = text.encode(errors="replace")[:LONGEST_BYTES].decode(errors="ignore")
    return zlib.compress(stored.encode())


def _unpacked(packed: bytes | None) -> str | None:
    return None if packed is None else zlib.decompress(packed).decode()
