"""Names, types, aliases and paths of artifacts, and references to their versions.

data:v3            version 3 of the artifact "data" of the run's project
data               its latest version
vision/data:best   the version with the alias "best" in the project "vision"
data@3fa9c1…       the version whose digest begins so
"""

import re
from typing import NamedTuple

from halfstep.telemetry.plain_json import SURROGATE

#: Of a name or type; an alias has fewer characters.
NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
NAME_ALLOWED = "1 to 128 letters, digits, '.', '_' and '-', the first a letter or a digit"
ALIAS = r"\A(?!v[0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
ALIAS_ALLOWED = (
    "1 to 64 letters, digits, '.', '_' and '-', the first a letter or a digit; not v and a number"
)
LATEST = "latest"
MOST_ALIASES, MOST_FILES = 20, 10_000  # of a version
#: A path within a version: no "..", no absolute path, no backslash, no control characters.
ENTRY = r"\A(?!\.{1,2}(/|\Z))[^/\\\x00-\x1f\x7f]+(/(?!\.{1,2}(/|\Z))[^/\\\x00-\x1f\x7f]+)*\Z"
ENTRY_CHARACTERS = 1024
ENTRY_ALLOWED = (
    f"a relative path of at most {ENTRY_CHARACTERS} characters, without '..', backslashes and "
    "control characters"
)
_VERSION = re.compile(r"v([0-9]{1,9})")
_DIGEST = re.compile(r"[0-9a-f]{6,64}")


class ArtifactError(ValueError):
    """An artifact that cannot be saved, found or downloaded; the message says what to do."""


class Version(NamedTuple):
    """Which version of an artifact. Exactly one field is set. Its text: v3, latest, @3fa9c1."""

    number: int | None = None
    alias: str | None = None
    digest: str | None = None  # the whole digest, or its beginning

    def __str__(self) -> str:
        if self.digest is not None:
            return f"@{self.digest}"
        return f"v{self.number}" if self.alias is None else self.alias


class Reference(NamedTuple):
    """Reference to one version. project: None: the run's."""

    project: str | None
    name: str
    version: Version


def parse_reference(text: str) -> Reference:
    """Parse a reference. Raises ArtifactError."""
    project, slash, rest = text.rpartition("/")
    name, mark, version = re.split(r"([:@]|\Z)", rest, maxsplit=1)
    if not re.match(NAME, name):
        raise ArtifactError(f"{text[:200]!r}: the name is {name[:100]!r}; allowed: {NAME_ALLOWED}")
    named = parse_version(f"@{version}" if mark == "@" else version if mark else LATEST)
    return Reference(project if slash else None, name, named)


def parse_version(text: str) -> Version:
    """Parse a version: v3, an alias, or @ and a digest. Raises ArtifactError."""
    if text.startswith("@"):
        if _DIGEST.fullmatch(digest := text[1:]):
            return Version(digest=digest)
        raise ArtifactError(f"the digest is {digest[:100]!r}; allowed: 6 to 64 hexadecimal digits")
    if match := _VERSION.fullmatch(text):
        return Version(number=int(match[1]))
    if re.match(ALIAS, text):
        return Version(alias=text)
    raise ArtifactError(
        f"the version is {text[:100]!r}; allowed: v and a number, an alias, or @ and a digest"
    )


def entry_problem(path: str) -> str | None:
    """Return why a path within a version is not valid; None if it is."""
    is_allowed = (
        len(path) <= ENTRY_CHARACTERS and re.match(ENTRY, path) and not SURROGATE.search(path)
    )
    return None if is_allowed else f"it is not valid; allowed: {ENTRY_ALLOWED}"
