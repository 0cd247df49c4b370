"""Tests that check many values."""

import pytest

from tests.marks import looped


def test_each_value_that_fails_is_named() -> None:
    """All values are checked, and each that fails is named."""

    @looped("one, other", [(1, 1), (1, 2), (2, 2), (2, 3)])
    def check(one: int, other: int) -> None:
        assert one == other

    with pytest.raises(BaseExceptionGroup) as raised:
        check()
    notes = [error.__notes__[-1] for error in raised.value.exceptions]
    assert notes == ["with {'one': 1, 'other': 2}", "with {'one': 2, 'other': 3}"]
