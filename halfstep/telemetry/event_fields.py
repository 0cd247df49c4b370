"""Types of the fields of events, with their bounds."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from halfstep.artifacts import names
from halfstep.telemetry.plain_json import CLEAN, LARGEST_WHOLE

LARGEST_ID = 2**31 - 1  # of a database row
LARGEST_SECONDS = 10**9
#: Name of a metric or optimizer: PostgreSQL indexes at most 2,704 bytes, 4 per character.
NAME_CHARACTERS = 200
TEXT_CHARACTERS = 100_000  # of a note, which may quote two texts of a configuration


def whole(low: int, high: int) -> Meta:
    """Return the bounds of a whole number."""
    return Meta(ge=low, le=high, description=f"a whole number from {low} to {high}")


def text(most: int, least: int = 0) -> Meta:
    """Return the bounds of a text, in characters."""
    description = f"{CLEAN}, of {least} to {most} characters"
    return Meta(min_length=least, max_length=most, description=description)


#: Floats that JSON lacks are texts in JSON. In an event that is not yet encoded they are floats.
NonFinite: TypeAlias = Literal["NaN", "Infinity", "-Infinity"]
Number: TypeAlias = Annotated[float, Meta(description="a number")] | NonFinite
#: A number that JSON has.
Finite: TypeAlias = Annotated[float, Meta(description="a finite number")]
#: A number other than NaN, which SQLite stores as NULL.
Scale: TypeAlias = (
    Annotated[float, Meta(description="a number that is not NaN")]
    | Literal["Infinity", "-Infinity"]
)
Count: TypeAlias = Annotated[int, whole(0, LARGEST_WHOLE)]
StepNumber: TypeAlias = Annotated[int, whole(1, LARGEST_WHOLE)]
SinceStep: TypeAlias = Annotated[int, whole(0, LARGEST_WHOLE)]  # 0: before the first step
#: Milliseconds since the run's first start; negative if a clock was set back.
ElapsedMs: TypeAlias = Annotated[int, whole(-LARGEST_WHOLE, LARGEST_WHOLE)]
RequestId: TypeAlias = Annotated[int, whole(1, LARGEST_ID)]
Seconds: TypeAlias = Annotated[
    float,
    Meta(ge=0, le=LARGEST_SECONDS, description=f"a number from 0 to {LARGEST_SECONDS}"),
]
Name: TypeAlias = Annotated[str, text(NAME_CHARACTERS, least=1)]
OptimizerName: TypeAlias = Annotated[str, text(NAME_CHARACTERS)]
Text: TypeAlias = Annotated[str, text(TEXT_CHARACTERS)]
FileName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.[A-Za-z0-9]{1,16}\Z",
        description="a plain file name with a suffix",
    ),
]
FileKind: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"\A(checkpoint|shard\.[a-z0-9]{1,20}|(weights|ema)(\.[^.\0]{1,100})?)\Z",
        description="checkpoint, shard.<rank>, weights, weights.<module>, ema or ema.<module>",
    ),
]
Sha256: TypeAlias = Annotated[
    str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description="64 hexadecimal digits")
]
ArtifactName: TypeAlias = Annotated[str, Meta(pattern=names.NAME, description=names.NAME_ALLOWED)]
ArtifactAlias: TypeAlias = Annotated[
    str, Meta(pattern=names.ALIAS, description=names.ALIAS_ALLOWED)
]
#: What printed a line; halfstep: the service or the library itself.
Stream: TypeAlias = Literal["stdout", "stderr", "halfstep"]
AlertLevel: TypeAlias = Literal["info", "warn", "error"]
DType: TypeAlias = Literal["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
Direction: TypeAlias = Literal["forward", "backward"]


class Part(Struct, frozen=True, kw_only=True):
    """Base class of objects within an event."""
