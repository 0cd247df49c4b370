"""The finding of a diagnosis: statement, evidence and remedies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One finding, with its evidence in the text."""

    title: str
    text: str
    module: str | None = None  # that a fork may run in fp32
    before: int | None = None  # the first affected step, if known
    remedies: tuple[str, ...] = ()  # names of actions in app.telemetry.suggested_actions
    part: str = ""  # the section of the run's page with the evidence
    cause: str = ""  # its section in docs/reference/diagnosis.md; empty for advice without a cause
    fix: str = ""  # the change to a script, as code
    is_certain: bool = True  # False: the evidence fits, and does not exclude other causes
