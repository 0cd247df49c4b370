"""Names of people and projects: what may be in one, and which of them are the same to a reader."""

import unicodedata

from db.errors import Invalid

#: Unicode's categories of what nobody sees, or what changes how the rest is read: controls,
#: formats (as zero-width and bidirectional ones), surrogates, private use, separators of lines.
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


#: Unicode 15.0's Default_Ignorable_Code_Point (DerivedCoreProperties.txt), which `unicodedata`
#: lacks: characters that are shown as nothing. U+2800, Braille's blank, is shown as a space.
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
    """Return the first character of a text that is not shown, None if all are."""
    return next((each for each in text if is_invisible(each)), None)


def key_of(name: str) -> str:
    """Return what a name is compared by: two that look alike, or differ in case alone, are one."""
    seen = "".join(each for each in name if not is_invisible(each))
    return " ".join(unicodedata.normalize("NFKC", seen).casefold().split())


def cleaned(name: str) -> str:
    """Return what a run is called, of which scripts make what they like: a blank for each character
    that nobody sees, but for those that nobody can keep, which are refused elsewhere.
    """
    kept = ("\0", *map(chr, range(0xD800, 0xE000)))
    shown = (" " if is_invisible(each) and each not in kept else each for each in name)
    return "".join(shown).strip()


def checked_name(name: str, *, most: int, field: str = "name") -> str:
    """Return a name without blanks at its ends. Raises Invalid if it cannot be one."""
    name = unicodedata.normalize("NFC", name.strip())
    if not 1 <= len(name) <= most:
        shown = f"{name[:100]!r} has {len(name)} characters"
        raise Invalid({field: f"{shown}; 1 to {most} are allowed"})
    unseen = first_invisible(name)
    if unseen is not None:
        shown = f"{name[:100]!r} has {unseen!r}"
        raise Invalid({field: f"{shown}, which nobody sees; allowed: characters that are shown"})
    return name
