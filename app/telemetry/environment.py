"""Environment of a run: machine, versions, command, source and git."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from app.telemetry.submit_command import submit_command
from db.errors import NotFound
from db.queue import workers
from db.runs import environments
from db.tables import RECIPE, Run
from db.telemetry import ingest
from halfstep.telemetry.events import PATH_CHARACTERS

PathText = Annotated[str, Field(max_length=PATH_CHARACTERS)]
Names = Annotated[list[PathText], Field(max_length=50)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class SourceFile(BaseModel):
    """The recipe's file, or a command's script."""

    path: PathText
    sha256: Annotated[str, Field(max_length=64)]
    size_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)]
    is_cut: Annotated[bool, Field(description="Whether only the first 256 kB are stored")]


class Git(BaseModel):
    """State of the folder's git repository."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    commit: Annotated[str | None, Field(max_length=64)] = None
    branch: Annotated[PathText, Field(description="Empty: a detached HEAD")] = ""
    remote: Annotated[PathText, Field(description="URL of the remote, without credentials")] = ""
    folder: PathText = ""
    """The working directory within the repository; empty: its root"""
    is_pushed: bool | None = None
    """Whether a remote branch had the commit; null: unknown"""
    is_dirty: bool = False
    changed: Annotated[Names, Field(description="Changed files, at most 50")] = []
    changed_count: Count = 0
    untracked: Annotated[Names, Field(description="Untracked files, at most 50")] = []
    untracked_count: Count = 0
    is_cut: Annotated[bool, Field(description="Whether only 256 kB of the diff are stored")] = False
    is_redacted: bool = False
    """Whether secrets in the diff are hidden, so that it may not apply"""
    error: Annotated[str | None, Field(max_length=500)] = None
    """Error of git, if it failed"""


class Environment(BaseModel):
    """Machine, versions, command and source of the latest attempt; without secrets."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    attempt: int
    worker: str | None
    host: str
    platform: str | None
    devices: list[dict[str, Any]]
    versions: Annotated[dict[str, str | None], Field(description="python, torch, cuda, driver, …")]
    command: list[str]
    folder: str | None
    file: SourceFile | None
    git: Annotated[Git | None, Field(description="Null if the folder is not in a repository")]
    has_other_source: bool
    """Whether the worker's recipe file has changed since"""
    has_requirements: bool = False
    """Whether the installed packages are recorded"""
    changed_sources: list[str] = []
    """Files of a command that have changed since it was queued"""
    submit_command: str | None = None
    """Command that queues a recipe's run again; null: of other runs"""


class FullEnvironment(Environment):
    """An environment with the texts of source, diff and packages."""

    source: str | None
    diff: str | None
    """Of tracked files and untracked code, against the commit"""
    requirements: str | None
    """Installed packages in pip's format, a line each"""


def environment_of(session: Session, run: Run) -> Environment | None:
    """Return the environment of the latest attempt; None before the first one.

    For a watched run only what its script reported.
    """
    if row := environments.newest(session, run.id):
        environment = Environment(attempt=row.attempt, **row.content, has_other_source=False)
        environment.has_requirements = environments.has_requirements(session, row)
        environment.has_other_source = _has_other_source(session, run, environment)
        environment.submit_command = submit_command(session, run)
        return environment
    if watched := ingest.attempt_of(session, run):
        unknown = {"worker": None, "platform": None, "folder": None, "file": None, "git": None}
        known = {"host": watched.host, "versions": watched.versions, "devices": [], "command": []}
        return Environment(attempt=watched.attempt, **unknown, **known, has_other_source=False)
    return None


def full_environment(session: Session, run: Run) -> FullEnvironment:
    """Return the environment with its texts. Raises NotFound."""
    environment = environment_of(session, run)
    if environment is None:
        raise NotFound(f"Run {run.id} has not started, so its environment is unknown.")
    row = environments.newest(session, run.id)
    texts = environments.texts(row) if row else environments.Texts()
    return FullEnvironment(**environment.model_dump(), **texts._asdict())


def _has_other_source(session: Session, run: Run, environment: Environment) -> bool:
    if run.source != RECIPE or environment.file is None:
        return False
    try:
        today = workers.recipe(session, run.recipe).get("sha256")
    except NotFound:
        return False
    return today not in (None, environment.file.sha256)
