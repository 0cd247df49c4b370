"""The brake on guessing passwords."""

import pytest

from app.brake import FORGET_SECONDS, FREE_TRIES, MOST_SECONDS, Brake, TooManyTries


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
    for _ in range(FREE_TRIES["address"]):
        brake.take(address="a", name="ada")
    waits = []
    for _ in range(8):
        waits.append(_wait(brake, address="a", name="ada"))
        clock.now += waits[-1]
        brake.take(address="a", name="ada")
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert max(waits) == MOST_SECONDS


def test_a_name_is_braked_from_whatever_address() -> None:
    """Many addresses do not help against one name, and other names go free."""
    brake = Brake(Clock())
    for number in range(FREE_TRIES["name"]):
        brake.take(address=f"a{number}", name="ada")
    assert _wait(brake, address="new", name="ada") == 1
    brake.take(address="new", name="bob")


def test_a_right_password_and_time_make_it_forget() -> None:
    """Who knows the password, or comes back much later, has the free tries again."""
    clock = Clock()
    brake = Brake(clock)
    for _ in range(2):
        for _ in range(FREE_TRIES["address"]):
            brake.take(address="a", name="ada")
        assert _wait(brake, address="a", name="bob") == 1
        brake.release(address="a", name="ada")
    for _ in range(FREE_TRIES["address"]):
        brake.take(address="a", name="ada")
    clock.now += FORGET_SECONDS + 1
    for _ in range(FREE_TRIES["address"]):
        brake.take(address="a", name="ada")
