"""Pictures and sounds of other loggers: what kind a file is, and which files may be read."""

from pathlib import Path

from halfstep.logged import MOST_BYTES

#: By how a file begins: what browsers show of what loggers write.
BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "wav"}
#: Of one run.
MOST = 1000


def suffix_of(content: bytes) -> str | None:
    """Return the suffix that its content calls for; None of a kind that no page shows."""
    found = (suffix for start, suffix in BEGINNINGS.items() if content.startswith(start))
    suffix = next(found, None)
    return None if suffix == "wav" and content[8:12] != b"WAVE" else suffix


def read(folder: Path, path: str) -> bytes | None:
    """Return a file of a run's own folder; None if it is elsewhere, too large, or not there."""
    root = folder.resolve()
    try:
        place = (root / path).resolve()
        if not (place.is_relative_to(root) and place.is_file()):
            return None
        return place.read_bytes() if place.stat().st_size <= MOST_BYTES else None
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL, a loop of links
        return None
