"""Environment of each attempt of a run, recorded for reproduction."""

import zlib
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from db.tables import RunEnvironment
from halfstep.telemetry.events import SOURCE_BYTES
from halfstep.telemetry.plain_json import JsonObject


class Texts(NamedTuple):
    """Source of the recipe or script, git patch and installed packages."""

    source: str | None = None
    diff: str | None = None
    requirements: str | None = None


TEXTS = (RunEnvironment.source, RunEnvironment.diff, RunEnvironment.requirements)


def record(session: Session, run_id: int, attempt: int, content: JsonObject, texts: Texts) -> None:
    """Store the environment of an attempt. The caller must hold the run."""
    session.merge(
        RunEnvironment(
            run_id=run_id,
            attempt=attempt,
            content=content,
            source=_pack(texts.source),
            diff=_pack(texts.diff),
            requirements=_pack(texts.requirements),
        )
    )
    session.flush()


def newest(session: Session, run_id: int) -> RunEnvironment | None:
    """Return the environment of the latest attempt, without its texts."""
    query = (
        select(RunEnvironment)
        .options(*map(defer, TEXTS))
        .where(RunEnvironment.run_id == run_id)
        .order_by(RunEnvironment.attempt.desc())
        .limit(1)
    )
    return session.scalar(query)


def has_requirements(session: Session, environment: RunEnvironment) -> bool:
    """Return whether the installed packages are recorded."""
    key = (
        RunEnvironment.run_id == environment.run_id,
        RunEnvironment.attempt == environment.attempt,
    )
    return bool(session.scalar(select(RunEnvironment.requirements.is_not(None)).where(*key)))


def texts(environment: RunEnvironment) -> Texts:
    """Return the texts of an environment."""
    return Texts(
        _unpack(environment.source),
        _unpack(environment.diff),
        _unpack(environment.requirements),
    )


def _pack(text: str | None) -> bytes | None:
    if text is None:
        return None
    # A character that the limit splits is dropped.
    stored = text.encode(errors="replace")[:SOURCE_BYTES].decode(errors="ignore")
    return zlib.compress(stored.encode())


def _unpack(packed: bytes | None) -> str | None:
    return None if packed is None else zlib.decompress(packed).decode()
