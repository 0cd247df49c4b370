"""Transformers and TRL: `trainer.add_callback(halfstep.transformers.Watch())`.

All of a step is heard from torch's own scaler and optimizers; this callback only says what the run
is called and configured with, where it resumes, and when it ends. What the trainer logs, an
evaluation's metrics say, is logged too.
"""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from halfstep.session import watch_session


class Watch(TrainerCallback):  # type: ignore[misc]
    """Watches one training. Takes what halfstep.watch takes."""

    def __init__(self, **named: Any) -> None:
        self._named = named
        self.watch: watch_session.Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Begin, once a checkpoint's state is in place."""
        if not state.is_world_process_zero:
            return
        self.watch = watch_session.watch(
            rest["model"], **{"config": args.to_dict(), "name": args.run_name} | self._named
        )
        if state.global_step:
            self.watch.resume(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        """Log an evaluation's numbers; those of the steps are the rows' own."""
        if self.watch and logs:
            self.watch.log({name: v for name, v in logs.items() if name.startswith("eval_")})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """End it. (An exception ends the process, which is heard as in any script.)"""
        if self.watch:
            self.watch.finish()
