"""Secrets: environment variables of commands, whose values are never shown.

The database has only their ciphertext. The key is a file that only its user can read: the server
creates it with the first secret, and a worker on another machine needs a copy.
"""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from cryptography.fernet import Fernet, InvalidToken
from sqlalchemy import delete as delete_from
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.clock import now
from db.errors import HalfstepError, Invalid, NotFound
from db.tables import Secret, User

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
#: Minimum length: shorter values would be masked in logs wherever they occur by chance.
SHORTEST, LONGEST = 8, 10_000
MOST = 1000


class Unreadable(HalfstepError):
    """A secret cannot be decrypted."""


def list_secrets(session: Session) -> list[tuple[Secret, str]]:
    """List secrets by name, each with the user who set it, without values."""
    query = select(Secret, User.name).join(User, User.id == Secret.user_id).order_by(Secret.name)
    return [(secret, user) for secret, user in session.execute(query.limit(MOST))]


def names(session: Session) -> list[str]:
    """List the names of all secrets."""
    return list(session.scalars(select(Secret.name).order_by(Secret.name).limit(MOST)))


def put(session: Session, key_file: Path, user: User, name: str, value: str) -> Secret:
    """Create or replace a secret. Raises Invalid, Unreadable."""
    if wrong := _mistakes(name, value):
        raise Invalid(wrong)
    row = session.get(Secret, name, with_for_update=True)
    if row is None:
        if len(names(session)) >= MOST:
            raise Invalid({"name": f"there are {MOST:,} secrets, the maximum"})
        row = Secret(name=name)
        session.add(row)
    row.ciphertext = encrypt(key_file, value)
    row.user_id, row.set_at = user.id, now()
    session.flush()
    return row


def delete(session: Session, name: str) -> None:
    """Delete a secret. Raises NotFound."""
    gone = session.scalar(delete_from(Secret).where(Secret.name == name).returning(Secret.name))
    if gone is None:
        raise NotFound(f"There is no secret {name[:100]!r}.")


def read(session: Session, key_file: Path, names: Collection[str]) -> dict[str, str]:
    """Return the values of these secrets. Raises Unreadable."""
    if not names:
        return {}
    rows = {row.name: row for row in session.scalars(select(Secret).where(Secret.name.in_(names)))}
    if missing := sorted(set(names) - rows.keys()):
        raise Unreadable(f"secret {missing[0]} no longer exists")
    cipher = _read_key(key_file)
    try:
        return {name: cipher.decrypt(row.ciphertext).decode() for name, row in rows.items()}
    except InvalidToken as error:
        text = (
            f"HALFSTEP_SECRETS_KEY_FILE: {key_file} is not the key with which they were encrypted"
        )
        raise Unreadable(f"secrets cannot be decrypted: {text}") from error


def encrypt(key_file: Path, text: str) -> str:
    """Encrypt a text for the database; the key is created if missing."""
    return _load_or_create_key(key_file).encrypt(text.encode()).decode()


def decrypt(key_file: Path, ciphertext: str) -> str:
    """Decrypt a text. Raises Unreadable."""
    try:
        return _read_key(key_file).decrypt(ciphertext).decode()
    except InvalidToken as error:
        text = f"HALFSTEP_SECRETS_KEY_FILE: {key_file} is not the key with which it was encrypted"
        raise Unreadable(f"a channel cannot be decrypted: {text}") from error


def _mistakes(name: str, value: str) -> dict[str, str]:
    wrong = {}
    if not NAME.fullmatch(name):
        allowed = "letters, digits and _, not a digit first, at most 100"
        wrong["name"] = f"it is {name[:100]!r}; allowed: {allowed}"
    elif name.startswith("HALFSTEP_"):
        wrong["name"] = "names that begin with HALFSTEP_ are reserved; use another name"
    if not SHORTEST <= len(value) <= LONGEST:
        allowed = f"{SHORTEST} to {LONGEST:,}, so that a log can be kept without it"
        wrong["value"] = f"it has {len(value):,} characters; allowed: {allowed}"
    elif any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
        wrong["value"] = "it contains NUL or a lone surrogate, which no variable can hold"
    return wrong


def _load_or_create_key(key_file: Path) -> Fernet:
    """Return the key, created if missing; of two concurrent creations the first wins."""
    if not key_file.exists():
        temporary = key_file.with_name(f".{key_file.name}.{os.getpid()}-{get_ident()}")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(Fernet.generate_key())
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            key_file.hardlink_to(temporary)
        temporary.unlink()
    return _read_key(key_file)


def _read_key(key_file: Path) -> Fernet:
    named = f"HALFSTEP_SECRETS_KEY_FILE: {key_file}"
    try:
        return Fernet(key_file.read_bytes().strip())
    except FileNotFoundError as error:
        text = f"{named} is not there; copy it from the server's machine"
        raise Unreadable(f"secrets cannot be decrypted: {text}") from error
    except (OSError, ValueError) as error:
        raise Unreadable(f"secrets cannot be decrypted: {named}: {error}") from error
