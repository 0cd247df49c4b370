"""A sentence on what is wrong with a run and what to do; db.findings finds them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """title: what is so; text: the figures, and what to do.

    module: that a fork may run in fp32, to mend it.  before: the step from which on things were
    wrong, if it is known.  remedies: what else may mend it, by the names that app.advice has.
    part: of the run's page, which shows the figures.
    """

    title: str
    text: str
    module: str | None = None
    before: int | None = None
    remedies: tuple[str, ...] = ()
    part: str = ""
