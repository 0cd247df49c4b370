"""Secrets, stored as ciphertext."""

from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import select

from db.access import secrets
from db.database import Database
from db.errors import Invalid, NotFound
from db.tables import Secret, User

VALUE = "sesame, open\n\tplease"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Path of the key."""
    return tmp_path / "secrets.key"


def test_a_secret_is_read_back_and_stored_encrypted(
    database: Database, ada: User, key: Path
) -> None:
    """A secret's row has neither value nor key; the key file is private to its user."""
    with database.writing() as session:
        secrets.put(session, key, ada, "TOKEN", "an older value")
        secrets.put(session, key, ada, "TOKEN", VALUE)
        secrets.put(session, key, ada, "OTHER", "other value")
    with database.reading() as session:
        row = session.get_one(Secret, "TOKEN")
        assert "sesame" not in row.ciphertext
        assert secrets.read(session, key, ["TOKEN"]) == {"TOKEN": VALUE}
        assert secrets.names(session) == ["OTHER", "TOKEN"]
        assert [(each.name, user) for each, user in secrets.list_secrets(session)] == [
            ("OTHER", "ada"),
            ("TOKEN", "ada"),
        ]
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_deleted_secret_is_gone(database: Database, ada: User, key: Path) -> None:
    """After a secret was deleted, requests for it get an error with its name."""
    with database.writing() as session:
        secrets.put(session, key, ada, "TOKEN", VALUE)
        secrets.delete(session, "TOKEN")
        assert session.scalars(select(Secret)).all() == []
        with pytest.raises(secrets.Unreadable, match="secret TOKEN no longer exists"):
            secrets.read(session, key, ["TOKEN"])
        with pytest.raises(NotFound, match="no secret 'TOKEN'"):
            secrets.delete(session, "TOKEN")


def test_a_missing_or_wrong_key_is_an_error(
    database: Database, ada: User, key: Path, tmp_path: Path
) -> None:
    """The error for a missing or wrong key has setting and file; without secrets none is needed."""
    with database.writing() as session:
        secrets.put(session, key, ada, "TOKEN", VALUE)
    other, broken = tmp_path / "other.key", tmp_path / "broken.key"
    other.write_bytes(Fernet.generate_key())
    broken.write_text("no key")
    with database.reading() as session:
        for path, message in (
            (tmp_path / "missing.key", "missing.key is not there; copy it"),
            (other, "other.key is not the key with which they were encrypted"),
            (broken, "broken.key: Fernet key must be"),
        ):
            with pytest.raises(secrets.Unreadable, match=message):
                secrets.read(session, path, ["TOKEN"])
        assert secrets.read(session, tmp_path / "missing.key", []) == {}


@pytest.mark.parametrize(
    ("name", "value", "field", "message"),
    [
        ("A B", VALUE, "name", "'A B'; allowed: letters"),
        ("1A", VALUE, "name", "not a digit first"),
        ("HALFSTEP_TOKEN", VALUE, "name", "are reserved"),
        ("A", "short", "value", "5 characters; allowed: 8 to 10,000"),
        ("A", "x" * 10_001, "value", "10,001 characters"),
        ("A", "sesame\0open", "value", "no variable can hold"),
        ("A", "sesame\ud800open", "value", "no variable can hold"),
    ],
)
def test_invalid_secrets_are_rejected(
    database: Database, ada: User, key: Path, name: str, value: str, field: str, message: str
) -> None:
    """The error for an invalid secret names the field without its value."""
    with database.writing() as session, pytest.raises(Invalid) as refused:
        secrets.put(session, key, ada, name, value)
    assert message in refused.value.errors[field]
    assert value not in str(refused.value)
