"""`wandb.Artifact`, served by the named artifacts of `watch`."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from halfstep.artifacts.manifest import files_in
from halfstep.artifacts.names import ArtifactError
from halfstep.wandb_compat.unsupported import Error, Unserved, report_ignored, say_once

if TYPE_CHECKING:
    from halfstep.session.artifacts import SavedVersion
    from halfstep.session.watch_session import Watch


class Artifact:
    """Files to log as a version, or a version that a run uses."""

    def __init__(
        self,
        name: str,
        type: str,  # noqa: A002 - W&B's name for it
        description: str | None = None,
        metadata: dict[str, Any] | None = None,
        incremental: bool = False,
        use_as: str | None = None,
        **further: Any,
    ) -> None:
        ignored = {"description": description, "metadata": metadata, "incremental": incremental}
        report_ignored("Artifact", {**ignored, "use_as": use_as, **further})
        self.name, self.type, self.description = name, type, description
        self.metadata = dict(metadata or {})
        self.aliases: list[str] = []
        self._files: dict[str, Path] = {}
        self._has_references = False
        self._problem: str | None = None  # why the files are not complete
        self._folder: Path | None = None  # of a version that is used
        self._saved: SavedVersion | None = None
        self._temporary: Path | None = None

    # ---- A new version ---------------------------------------------------------------------------

    def add_file(self, local_path: str | Path, name: str | None = None, **further: Any) -> None:
        """Add a file. name: its path within the version."""
        path = Path(local_path)
        self._files[name or path.name] = path

    def add_dir(self, local_path: str | Path, name: str | None = None, **further: Any) -> None:
        """Add all files of a folder. name: the folder within the version."""
        try:
            for path, place in files_in(Path(local_path)):
                self._files[f"{name.rstrip('/')}/{path}" if name else path] = place
        except (ArtifactError, OSError) as error:
            self._problem = str(error)
            say_once(f"Artifact({self.name!r}).add_dir() failed: {error}")

    @contextmanager
    def new_file(
        self, name: str, mode: str = "x", encoding: str | None = None
    ) -> Iterator[IO[Any]]:
        """Open a new file of the version."""
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="halfstep-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        path = self._temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding=encoding) as file:
            yield file
        self._files[name] = path

    def add(self, obj: Any, name: str, **further: Any) -> None:
        """Report that objects of W&B are not supported; files are."""
        say_once("Artifact.add() is not supported: add a file")

    def add_reference(self, uri: Any, *further: Any, **named: Any) -> None:
        """Report that references are not supported; files are."""
        self._has_references = True
        text = f"Artifact({self.name!r}).add_reference() is not supported and is ignored"
        say_once(f"{text}: a version contains its files; allowed: add_file() and add_dir()")

    def log(self, watch: "Watch", aliases: Sequence[str]) -> None:
        """Save the files as a version, unless it has references only."""
        if self._has_references and not self._files:
            say_once(f"log_artifact({self.name!r}) is ignored: it has only references")
            return
        if self._problem:
            say_once(f"log_artifact({self.name!r}) is ignored: {self._problem}")
            return
        self.aliases = [alias for alias in aliases if alias != "latest"]
        self._saved = watch.save_artifact(
            self._files, name=self.name, type=self.type, aliases=self.aliases
        )

    # ---- A version that is used ------------------------------------------------------------------

    @classmethod
    def of_version(cls, name: str, type: str | None, path: Path) -> "Artifact":  # noqa: A002
        """Return a version that is on the local disk."""
        artifact = cls(name, type or "")
        artifact._folder = path.parent if path.is_file() else path
        return artifact

    @property
    def digest(self) -> str:
        """The version's digest."""
        return self._saved.digest if self._saved else self._folder.name if self._folder else ""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(path.stat().st_size for path in self._paths().values())

    def wait(self, timeout: float | None = None) -> "Artifact":
        """Return the artifact: the upload goes on beside the training."""
        return self

    def download(self, root: str | Path | None = None, **further: Any) -> str:
        """Return the folder of the files; root: copy them there."""
        if root is not None:
            for name, path in self._paths().items():
                place = Path(root, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
            return str(root)
        if self._folder is None:
            raise Error(f"{self.name} is not a version that this run uses: use_artifact() first")
        return str(self._folder)

    def file(self, root: str | Path | None = None) -> str:
        """Return the path of the version's only file."""
        [name] = self._paths()
        return str(Path(self.download(root), name))

    def get_entry(self, name: str) -> "Entry":
        """Return a file of the version."""
        if name not in self._paths():
            raise KeyError(name)
        return Entry(name, self.download)

    get_path = get_entry

    def _paths(self) -> dict[str, Path]:
        return dict(files_in(self._folder)) if self._folder else self._files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Unserved(f"Artifact.{name}")


class Entry:
    """A file of a version."""

    def __init__(self, path: str, download: Callable[..., str]) -> None:
        self.path, self._download = path, download

    def download(self, root: str | Path | None = None, **further: Any) -> str:
        """Return the path of the file."""
        return str(Path(self._download(root), self.path))


def log_artifact(
    watch: "Watch",
    run_id: str,
    artifact: "Artifact | str | Path",
    name: str | None,
    type_: str | None,
    aliases: Sequence[str] | None,
) -> Artifact:
    """Log an artifact, or a file or folder as one."""
    if not isinstance(artifact, Artifact):
        path = Path(artifact)
        artifact = Artifact(name or f"run-{run_id}-{path.name}", type_ or "unspecified")
        if path.is_dir():
            artifact.add_dir(path)
        else:
            artifact.add_file(path)
    artifact.log(watch, [aliases] if isinstance(aliases, str) else list(aliases or ()))
    return artifact


def use_artifact(watch: "Watch", reference: "str | Artifact", type_: str | None) -> Artifact:
    """Return a version that the run uses. Raises Error without it: the script needs its files."""
    if isinstance(reference, Artifact):
        if reference._saved is None:
            raise Error(f"{reference.name} is not logged: log_artifact() first")
        reference = str(reference._saved)
    parts = reference.split("/")
    name = "/".join(parts[-2:])  # without W&B's entity
    try:
        path = watch.use(name)
    except Exception as error:
        raise Error(f"use_artifact({reference!r}): {error}") from error
    return Artifact.of_version(parts[-1], type_, path)
