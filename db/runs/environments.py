"""The environment of each attempt: machine, versions, source, git."""

import zlib
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from db.tables import RunEnvironment

#: Of a source and of a diff so much is kept, in UTF-8.
LONGEST_BYTES = 256_000


class Texts(NamedTuple):
    """The recipe's source or the script, and what git said had changed."""

    source: str | None
    diff: str | None


def record(
    session: Session, run_id: int, attempt: int, content: dict[str, Any], texts: Texts
) -> None:
    """Keep it; whoever calls holds the run."""
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
    """Return that of the latest attempt, without its texts."""
    query = (
        select(RunEnvironment)
        .options(defer(RunEnvironment.source), defer(RunEnvironment.diff))
        .where(RunEnvironment.run_id == run_id)
        .order_by(RunEnvironment.attempt.desc())
        .limit(1)
    )
    return session.scalar(query)


def texts(environment: RunEnvironment) -> Texts:
    """Read the texts of one."""
    return Texts(_unpacked(environment.source), _unpacked(environment.diff))


def _packed(text: str | None) -> bytes | None:
    if text is None:
        return None
    # A character that the limit cuts in two is left out.
    kept = text.encode(errors="replace")[:LONGEST_BYTES].decode(errors="ignore")
    return zlib.compress(kept.encode())


def _unpacked(packed: bytes | None) -> str | None:
    return None if packed is None else zlib.decompress(packed).decode()
