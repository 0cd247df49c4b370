"""W&B's counter of calls, and the step of the run at which values are logged."""

from halfstep.session.step_numbers import step_number
from halfstep.session.watch_session import Watch
from halfstep.telemetry.run_folder import last_logged
from halfstep.wandb_compat.unsupported import report_exceptions, say_once


class StepCounter:
    """Counter of the calls of `log`, which continues that of earlier attempts."""

    def __init__(self, watch: Watch, *, is_resumed: bool) -> None:
        self._watch = watch
        self.step = 0
        self._given: int | None = None  # step of the last call with one
        #: Between W&B's steps, which begin at 0, and ours, if the losses of a script are its steps.
        self.shift = 0
        self._reached: int | None = None  # last step of earlier attempts
        self.has_begun = not is_resumed  # logged, by which it is known whence it continues
        if is_resumed:
            self._log_on()

    @report_exceptions
    def _log_on(self) -> None:
        """Continue the counter after the last logged step of an earlier attempt."""
        watch = self._watch
        if self._is_observed:
            self._reached = watch.step
            return
        logged = last_logged(watch.files) if watch.files else None
        if watch.step:
            self._reached = self.step = max(watch.step, logged or 0)
            self.shift = 1
        elif logged is not None:
            self._reached, self.step = logged, logged + 1
        if not watch.has_no_torch and self._reached is not None:
            watch.log_on(self._reached)

    def begin(self, step: int | None = None, *, makes_row: bool = False) -> None:
        """Report whence a later attempt continues, at its first log.

        step: that the script has logged first; at an earlier one than the last its steps are
        repeated.  makes_row: it logs the row of its step.
        """
        self.has_begun = True
        reached, watch = self._reached, self._watch
        goes_back = step is not None and (reached is None or step <= reached)
        if goes_back and self._is_observed:
            say_once(
                f"log(step={step}): the run has reached step {reached}, and further steps are "
                f"counted from there; allowed: halfstep.watch(model).resume(STEP) after init()"
            )
        elif not watch.has_no_torch:
            return
        elif goes_back:
            self.step = step = int(step or 0)
            if makes_row:
                watch.resume(max(step - 1, 0))
            else:
                watch.log_on(max(step - 1, 0) if reached is None else reached)
        elif reached is not None:
            watch.log_on(reached)

    def take(self, step: object) -> int:
        """Return the step that the script has given its call, as a number."""
        self._given = number = step_number(step)
        return number

    def find_step(self, step: int | None = None) -> int | None:
        """Return the step to log at; None: the last observed step.

        Without `step`, the one that the script has given it, whether it counts from 0 or 1.
        """
        if step is not None:
            return step
        if self._is_observed and self._given in (self._watch.step - 1, self._watch.step):
            return self._given
        is_unknown = self._is_observed or self._watch.is_relayed
        return None if is_unknown else self.step + self.shift

    def count_for_child(self) -> int:
        """Return the step for a call in a child process, which counts like one in this process."""
        if self._is_observed:
            return self._watch.step
        self.step += 1
        return self.step - 1 + self.shift

    @property
    def _is_observed(self) -> bool:
        return bool(self._watch.step) and not self._watch.has_no_torch
