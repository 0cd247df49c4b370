"""The brake on guessing passwords."""

import pytest
from starlette.requests import Request

from app.brake import (
    FORGET_SECONDS,
    FREE_TRIES,
    MOST_SECONDS,
    Brake,
    TooManyTries,
    client_of,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _wait(brake: Brake, **who: str) -> int:
    with pytest.raises(TooManyTries) as caught:
        brake.take(**who)
    return caught.value.seconds


def test_waits_grow_and_end() -> None:
    """After the free tries each one makes the next wait longer, up to a minute."""
    clock = Clock()
    brake = Brake(clock)
    for _ in range(FREE_TRIES["name"]):
        brake.take(address="a", name="ada")
    waits = []
    for _ in range(8):
        waits.append(_wait(brake, address="a", name="ada"))
        clock.now += waits[-1]
        brake.take(address="a", name="ada")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert max(waits) == MOST_SECONDS


def _client(address: str, name: str) -> dict[str, str]:
    return client_of(Request({"type": "http", "client": (address, 0), "headers": []}), name)


def test_strangers_keep_nobody_out() -> None:
    """However many addresses guess at a name, and however often, another is not braked; an address
    that guesses at many names is, and a /64 is one address.
    """
    brake = Brake(Clock())
    for number in range(200):
        for _ in range(FREE_TRIES["name"]):
            brake.take(**_client(f"192.0.2.{number}", "ada"))
        assert _wait(brake, **_client(f"192.0.2.{number}", " ADA ")) == 1
    brake.take(**_client("198.51.100.7", "ada"))
    for number in range(FREE_TRIES["address"]):
        brake.take(**_client(f"2001:db8::{number:x}", f"user {number}"))
    assert _wait(brake, **_client("2001:db8::ffff", "ada")) == 1
    brake.take(**_client("2001:db8:0:1::", "ada"))


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more addresses than are kept the first are forgotten."""
    monkeypatch.setattr("app.brake.MOST_KEPT", 10)
    brake = Brake(Clock())
    for number in range(1000):
        brake.take(**_client(f"2001:db8:0:{number:x}::", "ada"))
    assert len(brake._tries) <= 12


def test_a_right_password_and_time_make_it_forget() -> None:
    """Who knows the password, or comes back much later, has the free tries again."""
    clock = Clock()
    brake = Brake(clock)
    for _ in range(2):
        for _ in range(FREE_TRIES["name"]):
            brake.take(address="a", name="ada")
        assert _wait(brake, address="a", name="ada") == 1
        brake.release(address="a", name="ada")
    for _ in range(FREE_TRIES["name"]):
        brake.take(address="a", name="ada")
    clock.now += FORGET_SECONDS + 1
    for _ in range(FREE_TRIES["name"]):
        brake.take(address="a", name="ada")
