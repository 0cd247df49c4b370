"""Sign-in: links, passwords, sessions, tokens."""

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from db.access import accounts
from db.clock import now
from db.database import Database
from db.errors import Invalid, InvalidCredentials
from db.tables import ApiToken, SignInLink, SignInSession, User
from tests.conftest import PASSWORDS


def test_link_signs_in_once(database: Database, ada: User) -> None:
    """A link is refused when it is used again."""
    with database.writing() as session:
        token = accounts.make_link_token(session, ada)
        assert accounts.redeem_link_token(session, token).id == ada.id
    with pytest.raises(InvalidCredentials, match="has been used"), database.writing() as session:
        accounts.redeem_link_token(session, token)


def test_link_expires(database: Database, ada: User) -> None:
    """A link that is too old is refused."""
    with database.writing() as session:
        token = accounts.make_link_token(session, ada)
        session.execute(update(SignInLink).values(expires_at=now() - 1))
    with pytest.raises(InvalidCredentials), database.writing() as session:
        accounts.redeem_link_token(session, token)


@pytest.mark.parametrize(
    ("name", "password"), [("ada", "wrong password"), ("bob", "correct horse"), ("ada", "")]
)
def test_wrong_names_and_passwords_get_the_same_error(
    database: Database, ada: User, name: str, password: str
) -> None:
    """The error for a wrong name or password does not reveal which of the two was wrong."""
    with database.writing() as session:
        accounts.set_password(session, session.get_one(User, ada.id), "correct horse")
        assert accounts.check_password(session, "ada", "correct horse").id == ada.id
    with (
        pytest.raises(InvalidCredentials, match="name or the password"),
        database.reading() as session,
    ):
        accounts.check_password(session, name, password)


def test_passwords_are_hashed_as_argon2_advises() -> None:
    """Passwords are hashed with the recommended Argon2id parameters, which other tests reduce."""
    assert PASSWORDS.hash("correct horse").startswith("$argon2id$v=19$m=65536,t=3,p=4$")


def test_user_without_password_cannot_sign_in_by_one(database: Database, ada: User) -> None:
    """A user without a password cannot sign in with one."""
    with pytest.raises(InvalidCredentials), database.reading() as session:
        accounts.check_password(session, "ada", "")


@pytest.mark.parametrize("password", ["short", "x" * 201])
def test_password_length_is_bounded(database: Database, ada: User, password: str) -> None:
    """The error for a password that is too short or too long has the allowed lengths."""
    with pytest.raises(Invalid, match="8 to 200"), database.writing() as session:
        accounts.set_password(session, ada, password)


def test_session_ends_at_sign_out_expiry_and_new_password(database: Database, ada: User) -> None:
    """A session ends at its expiry, at sign-out, and when the password changes."""
    with database.writing() as session:
        user = session.get_one(User, ada.id)
        secrets = [accounts.start_session(session, user)[0] for _ in range(3)]
        assert all(accounts.find_session(session, secret) for secret in secrets)
        accounts.end_session(session, secrets[0])
        assert accounts.find_session(session, secrets[0]) is None
        session.execute(update(SignInSession).values(expires_at=now() - 1))
        assert accounts.find_session(session, secrets[1]) is None
        session.execute(update(SignInSession).values(expires_at=now() + 60))
        accounts.set_password(session, user, "correct horse")
        assert accounts.find_session(session, secrets[2]) is None


def test_api_token_works_until_revoked_by_its_owner(database: Database, ada: User) -> None:
    """A token authenticates its user; other users cannot revoke it; it is stored as a hash."""
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        token, row = accounts.make_api_token(session, ada, "laptop")
        assert token not in (session.get_one(ApiToken, row.id).token_hash, row.name)
        accounts.delete_api_token(session, bob, row.id)
        found = accounts.find_api_token(session, token)
        assert found is not None
        assert found[0].id == ada.id
        accounts.delete_api_token(session, ada, row.id)
        assert accounts.find_api_token(session, token) is None


@pytest.mark.parametrize("name", ["", "  ", "x" * 65])
def test_user_name_is_bounded(database: Database, name: str) -> None:
    """A user's name has 1 to 64 characters."""
    with pytest.raises(Invalid, match="1 to 64"), database.writing() as session:
        accounts.user_named(session, name)


def test_use_of_a_token_is_noted_once_a_minute(database: Database, ada: User) -> None:
    """Recording the use of a token costs at most one write a minute."""
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "laptop")
        assert _is_noted(session, token) is False
        accounts.note_use(session, token)
        assert _is_noted(session, token) is True
        session.execute(update(ApiToken).values(used_at=now() - accounts.USE_NOTED_SECONDS))
        assert _is_noted(session, token) is False


def _is_noted(session: Session, token: str) -> bool:
    found = accounts.find_api_token(session, token)
    assert found is not None
    return found.is_noted
