"""A sentence on what is wrong with a run and what to do; db.findings finds them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """title: what is so; text: the figures, and what to do.

    module: that a fork may run in fp32, to mend it; from before which step, if it is known.
    """

    title: str
    text: str
    module: str | None = None
    before: int | None = None
