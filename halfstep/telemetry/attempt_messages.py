"""Files between an attempt's supervisor and its training process: one class per file.

halfstep.telemetry.attempt_files has their paths. Each is one JSON object, replaced as a whole. A
float may be NaN or Infinity, as Python's JSON writes them.
"""

import json
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from halfstep import untrusted_files
from halfstep.telemetry.plain_json import JsonObject, safe_repr
from halfstep.telemetry.validation import explain

#: Of all files; a file with a higher one is of a newer version.
FORMAT = 1
#: Bound of a file that a run writes, and of the others, which have a configuration.
MOST_OF_RUN, MOST_BYTES = 4 * 2**20, 32 * 2**20
Stop: TypeAlias = Literal["cancel", "pause", "preempt"]
#: How a training ended.
Status: TypeAlias = Literal["finished", "failed", "cancelled", "paused", "preempted"]
#: How a watched script ended.
WatchedStatus: TypeAlias = Literal["finished", "failed", "terminated", "interrupted", "vanished"]
RequestKind: TypeAlias = Literal["checkpoint", "scale", "replay", "precision_diff"]


class Message(Struct, frozen=True, kw_only=True):
    """Base class of all files; unknown fields are ignored."""

    format: int = FORMAT  # most files of 0.1.0 and earlier have none


M = TypeVar("M", bound=Message)


class Job(Message, frozen=True, kw_only=True):
    """Fields of every job-<attempt>.json, the first file that an attempt's process reads."""

    started_at: float  # the run's first start, by halfstep.clock
    project: str = ""  # of the run, and so of the artifacts that a script names without one


class TrainingJob(Job, frozen=True, kw_only=True):
    """job-<attempt>.json of a run with a recipe."""

    run: int  # id
    attempt: int
    recipe: str  # name of a recipe, or path of its file
    config: JsonObject  # as submitted, with the defaults that its user saw
    seconds_before: float = 0.0  # that earlier attempts trained
    resume: str | None  # path of the checkpoint to continue from
    weights: dict[str, str] = {}  # paths of initial weights by module; "": of the only one
    checkpoints: dict[str, str] = {}  # paths by name, to measure with instead of training
    device: str  # "cpu", or "cuda" for the device of each rank
    # Of a run on several nodes.
    host: str = "localhost"  # address of this machine for the other nodes
    timeout_seconds: float | None = None  # of collective operations


class CommandJob(Job, frozen=True, kw_only=True):
    """job-<attempt>.json of a run that is a command."""

    argv: list[str]
    words: list[str] = []  # of the command, as its user typed them
    folder: str  # working folder
    sources: dict[str, str] = {}  # SHA-256 of its code when it was queued, by path


class ControlRequest(Message, frozen=True, kw_only=True):
    """A request of a user, carried out once, at a step boundary.

    checkpoint: acknowledged by the event of that name. scale: the value from the next step on.
    replay: of the step `value`: a past one with the current weights, a later one as soon as it has
    been attempted. precision_diff: of the step just made.
    """

    id: int
    kind: RequestKind
    value: float = 0.0


class ControlState(Message, frozen=True, kw_only=True):
    """control-<attempt>.json: what users request of a training, read at step boundaries."""

    stop: Stop | None = None  # persists
    requests: list[ControlRequest] = []  # each until its acknowledgement is recorded


class Lease(Message, frozen=True, kw_only=True):
    """lease-<attempt>.json: when a training ends whose lease is not renewed, by halfstep.clock."""

    ask: float  # it is asked to save a checkpoint and end
    kill: float  # it is killed


class Rendezvous(Message, frozen=True, kw_only=True):
    """rendezvous-<attempt>.json: address of the store of rank 0."""

    host: str
    port: int


class TrainingOutcome(Message, frozen=True, kw_only=True):
    """outcome-<attempt>.json of a training process."""

    status: Status
    step: int  # the last recorded one
    error: str | None = None  # the traceback, or another text
    #: "code", "settings", "rule" of the configuration, or "rank": another was lost.
    failure_kind: str | None = None


class AttemptEntry(Message, frozen=True, kw_only=True):
    """One attempt in run.json: a watching process."""

    attempt: int  # number, from 1
    started: str = ""  # time, in ISO 8601
    host: str = ""
    pid: int = 0
    pid_started: int | None = None  # halfstep.process.started; None: unknown
    pid_space: str | None = None  # halfstep.process.pid_space, in which pid is valid; None: unknown
    command: list[str] = []  # arguments, without secrets
    folder: str = ""  # working folder
    versions: dict[str, str] = {}  # of Python and packages


class RunFile(Message, frozen=True, kw_only=True):
    """run.json of a watched run: what its uploader sends of it."""

    id: str
    name: str
    run: str | UnsetType = UNSET  # the argument `run`, if the folder has another name
    project: str | None = None
    config: JsonObject | None = None
    tags: list[str] = []
    started: str  # of its first attempt, in ISO 8601
    attempts: list[AttemptEntry]  # in order of their numbers


class WatchedOutcome(Message, frozen=True, kw_only=True):
    """outcome-<attempt>.json of a watched script; by its uploader if the script was killed."""

    status: WatchedStatus
    step: int  # the last one
    error: str | None = None  # the traceback, or another text
    exit_code: int | None = None  # negative for a signal; None if the process continued, or unknown
    preemption: str | None = None  # "SIGTERM in Slurm job 42", if a batch system has ended it
    spool_bytes: int = 0  # of the attempt's spool, as its writer knows it
    ended: str = ""  # time, in ISO 8601


def write_message(path: Path, message: Message) -> None:
    """Replace a file atomically: a reader sees the old or the new content, never a part."""
    untrusted_files.write(path.parent, path.name, encode(message).encode())


def encode(message: Message) -> str:
    """Return the JSON of a file."""
    return json.dumps(msgspec.to_builtins(message))


def read_message(path: Path, kind: type[M], most_bytes: int = MOST_BYTES) -> M:
    """Return the content of a file.

    Raises OSError, and ValueError with the run's folder, the file, field and value.
    """
    text = untrusted_files.read(path.parent, path.name, most_bytes)
    name = f"{path.parent.name}/{path.name}"
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{name} is {safe_repr(fields)}; allowed: an object")
    number = fields.get("format", FORMAT)
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(
            f"{name} has format {number}; this version of Halfstep reads {FORMAT}: update it"
        )
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {explain(error, fields, kind)}") from error
