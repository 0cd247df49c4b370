"""Spool files of an attempt and those before it, and the quarantine of what cannot be recorded."""

from pathlib import Path

from halfstep import untrusted_files
from halfstep.telemetry.spool import Unrecordable, frame, spool_files


class SpoolFiles:
    """Spool files of this and earlier attempts: a later one may be writing in the same folder."""

    def __init__(self, folder: Path, run_folder: Path, attempt: int) -> None:
        self.folder, self._attempt = folder, attempt
        self._quarantine = run_folder / f"quarantine-{attempt}"

    def delete(self) -> None:
        """Delete the files, which are fully recorded."""
        for name in self._list():
            untrusted_files.delete(self.folder, name)

    def quarantine(self) -> str:
        """Move the files away, as they would fail again; return a message about it."""
        try:
            self._quarantine.mkdir(exist_ok=True)
            for name in self._list():
                untrusted_files.take_over(self.folder, name, self._quarantine / name)
                untrusted_files.delete(self.folder, name)
        except OSError as problem:
            return f"nor could it be moved to {self._quarantine}: {problem}"
        return f"it was moved to {self._quarantine}"

    def quarantine_frame(self, item: Unrecordable) -> str:
        """Save an unrecordable frame unchanged; return its problem and where it is."""
        try:
            self._quarantine.mkdir(exist_ok=True)
            with (self._quarantine / "frames").open("ab") as file:
                file.write(frame(item.kind, item.payload))
        except OSError as problem:
            return f"{item.problem} (not kept in {self._quarantine}: {problem})"
        return f"{item.problem} (kept in {self._quarantine})"

    def _list(self) -> list[str]:
        names = [path.name for path in spool_files(self.folder)]
        return [name for name in names if int(name.partition("-")[0]) <= self._attempt]
