"""The finding of a diagnosis: statement, evidence and remedies."""

from dataclasses import dataclass

#: Causes that another precision removes.
OF_PRECISION = frozenset({"forward_overflow", "backward_overflow"})
#: Causes of numbers that are not finite, by where they are made.
OF_NUMBERS = OF_PRECISION | {
    *("singular_gradient", "undefined_forward", "nonfinite_inputs", "nonfinite_without_scaler"),
    *("rounding", "carried"),
}
#: The cause of numbers that half precision loses in a validation; it explains nothing else.
OF_VALIDATION = "validation_overflow"
#: Causes of a non-finite loss, of skips, and of steps without effect.
EXPLAINING = OF_NUMBERS | {
    *("adam_eps_underflow", "gradients_not_cleared", "scaler_not_restored", "step_outside_scaler"),
    *("step_left_out", "no_gradient", "zero_gradients", "scaled_gradients_compared"),
    *("scaled_gradients_edited", "scaled_gradients_in_loss", "scaled_by_another"),
    *("gradients_not_scaled", "scaled_gradients_kept"),
}


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
    is_fault: bool = False  # something is wrong; always so if there is a cause
    evidence: object = None  # the event that shows it, where that is one
    is_certain: bool = True  # False: the evidence fits, and does not exclude other causes
    is_harmless: bool = False  # it could be better, and nothing is wrong

    @property
    def is_certain_fault(self) -> bool:
        """Whether something is certainly wrong, other than what could be better."""
        is_fault = self.is_fault or bool(self.cause)
        return self.is_certain and is_fault and not self.is_harmless
