"""A finding about a run: statement, evidence and remedies. db.health.findings makes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One finding, with its evidence in the text."""

    title: str
    text: str
    module: str | None = None  # that a fork may run in fp32
    before: int | None = None  # the step from which on things were wrong, if known
    remedies: tuple[
        str, ...
    ] = ()  # what else may help, by the names that app.telemetry.suggested_actions has
    part: str = ""  # of the run's page, which shows the figures
    cause: str = (
        ""  # its section in docs/reference/diagnosis.md; empty for advice that names no fault
    )
    fix: str = ""  # the change to a script, as code
    is_certain: bool = True  # False: the evidence fits, and does not exclude other causes
