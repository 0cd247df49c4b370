"""Files of a run by key: what it logged under one name, over its steps."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from db.tables import Artifact

_IMAGES = ("png", "jpg", "gif", "webp")
#: Kinds of files by the endings of their names, longest first.
_KINDS = {
    "plot.json": "plot",
    "histogram.json": "histogram",
    "json": "json",
    "csv": "table",
    "txt": "text",
    "wav": "audio",
    "html": "html",
    **dict.fromkeys(("mp4", "webm", "ogg"), "video"),
    **dict.fromkeys(_IMAGES, "image"),
}
#: Kinds that the Media tab shows.
MEDIA = frozenset(_KINDS.values()) - {"json"}
#: An image in a cell of a table, which `halfstep.session.logged_values` names after the table.
_CELL = re.compile(r"(.+)\.cell-\d+-\d+\.png")
_CAPTION = ".caption.txt"
#: An image or a clip of a list, and its caption.
_NUMBERED = re.compile(rf"(.+?)(-\d+)?(\.caption\.txt|\.(?:{'|'.join(_IMAGES)}|wav))")


@dataclass(frozen=True)
class FileKey:
    """Files that a run logged under one name, with images of a list or of a table's cells."""

    name: str
    kind: str
    files: list[Artifact] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps that it was logged at, in order."""
        return sorted({file.step for file in self.files})

    @property
    def newest(self) -> Artifact:
        """The file of the last step that bears the key's name."""
        return max(self.files, key=lambda file: (file.step, not _CELL.fullmatch(file.name)))

    @property
    def has_only_captions(self) -> bool:
        """Whether it is the caption of a file with a key of its own: a video or a document."""
        return all(file.name.endswith(_CAPTION) for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all its files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def as_json(self) -> str:
        """Step, number and name of each file, for `media.js`; number 0: not on the server."""
        rows = [(file.step, file.id if file.is_stored else 0, file.name) for file in self.files]
        return json.dumps(rows, separators=(",", ":"))


def file_keys(files: Iterable[Artifact]) -> list[FileKey]:
    """Group files by key, in the order in which they appeared; a key's files in order of step."""
    keys: dict[str, FileKey] = {}
    for file in sorted(files, key=lambda file: (file.step, file.id)):
        name = key_name(file.name)
        keys.setdefault(name, FileKey(name, _kind(name, file.name))).files.append(file)
    return [replace(key, kind="text") if key.has_only_captions else key for key in keys.values()]


def key_name(name: str) -> str:
    """Return the key that a file belongs to."""
    if cell := _CELL.fullmatch(name):
        return f"{cell[1]}.csv"
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name


def _kind(key: str, name: str) -> str:
    if key.endswith(".csv"):
        return "table"
    if name.endswith(_CAPTION):
        return "image"
    ending = next((ending for ending in _KINDS if name.endswith(f".{ending}")), "")
    return _KINDS.get(ending, name.rpartition(".")[2] if "." in name else "file")
