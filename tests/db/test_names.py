"""Names of users, projects, runs and stored objects: no character in them is invisible."""

import pytest

from db.errors import Invalid
from db.names import check_name, clean, key_of, without_invisible
from tests.marks import looped

#: Of each range of Default_Ignorable_Code_Point the first or last, and others of several kinds.
HIDDEN = [
    *("\u00ad", "\u034f", "\u061c", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u180b", "\u180e"),
    *("\u200b", "\u200d", "\u200f", "\u202e", "\u2060", "\u2065", "\u206f", "\u2800", "\u3164"),
    *("\ufe00", "\ufe0f", "\ufeff", "\uffa0", "\ufff0", "\U0001bca0", "\U0001d173"),
    *("\U000e0001", "\U000e007f", "\U000e0100", "\U000e01ef", "\U000e0fff"),
    *("\x1b", "\x7f", "\u0085", "\u2028", "\ue000"),
]


@looped("hidden", HIDDEN)
def test_a_name_has_no_invisible_character(hidden: str) -> None:
    """Invisible characters are rejected in names that users choose, replaced in those of runs,
    and removed elsewhere.
    """
    with pytest.raises(Invalid, match="which is invisible"):
        check_name(f"a{hidden}da", most=10)
    assert clean(f"a{hidden}da") == "a da"
    assert clean(hidden) == without_invisible(hidden) == ""
    assert without_invisible(f"{hidden}Ada \t {hidden} Lo") == "Ada Lo"
    assert key_of(f"a{hidden}da") == key_of("ada")


def test_names_in_any_script_are_kept() -> None:
    """Letters of any script with combining marks, and symbols, are allowed in names."""
    for name in ("Ada Lovelace", "Zoë", "Иван", "李明", "김철수", "ﷺ", "अदा", "run 7 ✓", "naïve-α"):
        assert check_name(name, most=20) == name
        assert clean(name) == without_invisible(name) == name
