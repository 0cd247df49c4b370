"""Names of people and projects: what may be in one, and which of them are the same to a reader."""

import unicodedata

from db.errors import Invalid

#: Unicode's categories of what nobody sees, or what changes how the rest is read: controls,
#: formats (as zero-width and bidirectional ones), surrogates, private use, separators of lines.
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def key_of(name: str) -> str:
    """Return what a name is compared by: two that look alike, or differ in case alone, are one."""
    seen = "".join(each for each in name if unicodedata.category(each) not in UNSEEN)
    return " ".join(unicodedata.normalize("NFKC", seen).casefold().split())


def cleaned(name: str) -> str:
    """Return what a run is called, of which scripts make what they like: a blank for each character
    that nobody sees, but for those that nobody can keep, which are refused elsewhere.
    """
    kept = ("\0", *map(chr, range(0xD800, 0xE000)))
    shown = (
        " " if unicodedata.category(each) in UNSEEN and each not in kept else each for each in name
    )
    return "".join(shown).strip()


def checked_name(name: str, *, most: int, field: str = "name") -> str:
    """Return a name without blanks at its ends. Raises Invalid if it cannot be one."""
    name = unicodedata.normalize("NFC", name.strip())
    if not 1 <= len(name) <= most:
        shown = f"{name[:100]!r} has {len(name)} characters"
        raise Invalid({field: f"{shown}; 1 to {most} are allowed"})
    unseen = next((each for each in name if unicodedata.category(each) in UNSEEN), None)
    if unseen is not None:
        shown = f"{name[:100]!r} has {unseen!r}"
        raise Invalid({field: f"{shown}, which nobody sees; allowed: characters that are shown"})
    return name
