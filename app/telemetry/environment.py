"""What a run was started in, for its page and for scripts."""

from typing import Annotated, Any

from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from db.errors import NotFound
from db.queue import workers
from db.runs import environments
from db.tables import RECIPE, Run
from db.telemetry import ingest


class SourceFile(BaseModel):
    """The recipe's file, or a command's script."""

    path: str
    sha256: str
    size_bytes: int
    is_cut: Annotated[bool, Field(description="Whether only the first 256 kB are kept")]


class Git(BaseModel):
    """What git said of the folder."""

    commit: str | None = None
    is_dirty: bool = False
    untracked: Annotated[list[str], Field(description="Files it does not know, 50 at most")] = []
    untracked_count: int = 0
    is_cut: Annotated[bool, Field(description="Whether only 256 kB of the diff are kept")] = False
    error: Annotated[str | None, Field(description="Where it refused, why")] = None


class Environment(BaseModel):
    """Machine, versions, command and source of the latest attempt; without secrets."""

    attempt: int
    worker: str | None
    host: str
    platform: str | None
    devices: list[dict[str, Any]]
    versions: Annotated[dict[str, str | None], Field(description="python, torch, cuda, driver, …")]
    command: list[str]
    folder: str | None
    file: SourceFile | None
    git: Annotated[Git | None, Field(description="Null where the folder is in no repository")]
    has_other_source: Annotated[
        bool, Field(description="Whether the recipe's file is another today, as its worker says")
    ]


class FullEnvironment(Environment):
    """The same with its texts."""

    source: str | None
    diff: Annotated[str | None, Field(description="Of what git knows, against the commit")]


def environment_of(session: Session, run: Run) -> Environment | None:
    """Return what is known: of a watched run as much as it told, of one in the queue nothing."""
    if found := environments.newest(session, run.id):
        told = Environment(attempt=found.attempt, **found.content, has_other_source=False)
        told.has_other_source = _has_other_source(session, run, told)
        return told
    if watched := ingest.attempt_of(session, run):
        nothing = {"worker": None, "platform": None, "folder": None, "file": None, "git": None}
        what = {"host": watched.host, "versions": watched.versions, "devices": [], "command": []}
        return Environment(attempt=watched.attempt, **nothing, **what, has_other_source=False)
    return None


def full_environment(session: Session, run: Run) -> FullEnvironment:
    """Return it with its texts. Raises NotFound."""
    told = environment_of(session, run)
    if told is None:
        raise NotFound(f"Nothing is known of what run {run.id} was started in.")
    found = environments.newest(session, run.id)
    source, diff = environments.texts(found) if found else (None, None)
    return FullEnvironment(**told.model_dump(), source=source, diff=diff)


def _has_other_source(session: Session, run: Run, told: Environment) -> bool:
    if run.source != RECIPE or told.file is None:
        return False
    try:
        today = workers.recipe(session, run.recipe).get("sha256")
    except NotFound:
        return False
    return today not in (None, told.file.sha256)
