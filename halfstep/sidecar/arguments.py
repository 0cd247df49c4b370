"""Arguments of the sidecar's process."""

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from halfstep.telemetry.event_fields import Stream


class CapturedStream(NamedTuple):
    """A captured stream, as inherited file descriptors."""

    name: "Stream"
    reading: int  # where its output arrives
    original: int  # where it went before


class Arguments(NamedTuple):
    """Data that a sidecar records. Secrets are sent through `control`."""

    folder: str  # of the run; empty for a further rank
    attempt: int
    rank: int  # 0: the rank that has the run
    meeting: str  # file by which ranks find the run's folder; or empty
    control: int  # descriptor of the socket to the training
    streams: list[CapturedStream]
    samples: bool  # sample the machine
    describes: bool  # record git state and packages
    script: str  # path of the script; or empty
    keeps_code: bool  # record the script's text too
    pid: int  # of the training
    elapsed_seconds: float  # of the run so far

    def encode(self) -> str:
        """Return the text for the command line."""
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: str) -> "Arguments":
        """Return the arguments of a text; not by msgspec, for whose import the training waits."""
        fields = json.loads(text)
        return cls(
            **fields | {"streams": [CapturedStream(*stream) for stream in fields["streams"]]}
        )
