"""Wrong passwords, counted in the database."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select
from starlette.requests import Request

from app.auth.login_throttling import client_of
from db.access import login_attempts
from db.access.login_attempts import FORGET_SECONDS, FREE_ATTEMPTS, MOST_SECONDS, TooManyAttempts
from db.database import Database
from db.tables import LoginAttempts


class Clock:
    now = 1_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that tests advance."""
    clock = Clock()
    reading = SimpleNamespace(current=lambda _session: clock.now)
    monkeypatch.setattr("db.access.login_attempts.clock", reading)
    return clock


@pytest.fixture
def take(database: Database, clock: Clock) -> Callable[..., int]:
    """Record an attempt; return the seconds to wait, or 0."""

    def take(**who: str) -> int:
        try:
            with database.writing() as session:
                login_attempts.take(session, **who)
        except TooManyAttempts as error:
            return error.seconds
        return 0

    return take


def test_waits_grow_and_end(take: Callable[..., int], clock: Clock) -> None:
    """After the free attempts each one waits longer than the last, up to a minute."""
    for _ in range(FREE_ATTEMPTS["name"]):
        assert not take(address="a", name="ada")
    waits = []
    for _ in range(8):
        waits.append(take(address="a", name="ada"))
        clock.now += waits[-1]
        assert not take(address="a", name="ada")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert max(waits) == MOST_SECONDS


def _client(address: str, name: str) -> dict[str, str]:
    return client_of(Request({"type": "http", "client": (address, 0), "headers": []}), name)


@pytest.mark.slow
def test_strangers_cannot_lock_users_out(take: Callable[..., int]) -> None:
    """Guesses at a name do not slow other addresses; an address that guesses many names is
    slowed, and a /64 counts as one.
    """
    for number in range(10):
        for _ in range(FREE_ATTEMPTS["name"]):
            assert not take(**_client(f"192.0.2.{number}", "ada"))
        assert take(**_client(f"192.0.2.{number}", " ADA ")) == 1
    assert not take(**_client("198.51.100.7", "ada"))
    for number in range(FREE_ATTEMPTS["address"]):
        assert not take(**_client(f"2001:db8::{number:x}", f"user {number}"))
    assert take(**_client("2001:db8::ffff", "ada")) == 1
    assert not take(**_client("2001:db8:0:1::", "ada"))


def test_attempts_are_reset_by_success_and_time(
    database: Database, take: Callable[..., int], clock: Clock
) -> None:
    """A successful sign-in and a pause restore the free attempts; expired rows are deleted."""
    for _ in range(2):
        for _ in range(FREE_ATTEMPTS["name"]):
            assert not take(address="a", name="ada")
        assert take(address="a", name="ada") == 1
        with database.writing() as session:
            login_attempts.release(session, address="a", name="ada")
    for _ in range(FREE_ATTEMPTS["name"]):
        assert not take(address="a", name="ada")
    clock.now += FORGET_SECONDS + 1
    for _ in range(FREE_ATTEMPTS["name"]):
        assert not take(address="b", name="ada")
    with database.reading() as session:
        assert session.scalar(select(func.count()).select_from(LoginAttempts)) == 2
