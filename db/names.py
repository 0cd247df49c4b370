"""Validation and normalization of the names of users and projects."""

import re
import unicodedata
from functools import lru_cache

from db.errors import Invalid

#: Unicode categories of invisible characters, or of those that change how others are shown:
#: controls, formats (such as zero-width and bidirectional ones), surrogates, private use,
#: separators of lines.
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


#: Unicode 15.0's Default_Ignorable_Code_Point (DerivedCoreProperties.txt), which `unicodedata`
#: lacks: invisible characters. U+2800, the Braille blank, is shown as a space.
INVISIBLE = (
    *((0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
    *((0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x2800, 0x2800)),
    *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8)),
    *((0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
)


def is_invisible(character: str) -> bool:
    """Return whether a character is not shown, or changes how the others are."""
    code = ord(character)
    if code < 0x7F:
        return code < 0x20
    is_ignorable = any(first <= code <= last for first, last in INVISIBLE)
    return is_ignorable or unicodedata.category(character) in UNSEEN


def first_invisible(text: str) -> str | None:
    """Return the first invisible character of a text, or None."""
    return next((character for character in text if is_invisible(character)), None)


def key_of(name: str) -> str:
    """Return the normalized form of a name, equal for names that look alike or differ in case."""
    visible = "".join(character for character in name if not is_invisible(character))
    return " ".join(unicodedata.normalize("NFKC", visible).casefold().split())


def clean(name: str) -> str:
    """Return the name of a run with spaces instead of invisible characters.

    Zero bytes and surrogates, which a database cannot store, are rejected elsewhere.
    """
    rejected = ("\0", *map(chr, range(0xD800, 0xE000)))
    shown = (" " if is_invisible(c) and c not in rejected else c for c in name)
    return "".join(shown).strip()


@lru_cache(20_000)
def natural_key(name: str) -> tuple[str, str]:
    """Return the sort key of a name by its numbers: layer2 before layer10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), name), name


def without_invisible(name: str) -> str:
    """Return a name from elsewhere as it is shown: no invisible characters, single spaces."""
    return " ".join("".join(c for c in name if c.isspace() or not is_invisible(c)).split())


def check_name(name: str, *, most: int) -> str:
    """Return a name without surrounding spaces. Raises Invalid if it is not allowed."""
    name = unicodedata.normalize("NFC", name.strip())
    if not 1 <= len(name) <= most:
        shown = f"{name[:100]!r} has {len(name)} characters"
        raise Invalid({"name": f"{shown}; 1 to {most} are allowed"})
    unseen = first_invisible(name)
    if unseen is not None:
        shown = f"{name[:100]!r} has {unseen!r}"
        raise Invalid({"name": f"{shown}, which is invisible; allowed: visible characters"})
    return name
