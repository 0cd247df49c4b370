"""Transformers and TRL: `trainer.add_callback(halfstep.transformers.Watch())`.

Steps are observed through torch's own scaler and optimizers; this callback only passes the run's
name, configuration and step to resume from, logs evaluation metrics, and finishes the run.
"""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from halfstep.session import run_start, watch_session


class Watch(TrainerCallback):  # type: ignore[misc]
    """Callback that watches one training. Takes the arguments of halfstep.watch."""

    def __init__(self, **named: Any) -> None:
        self._named = named
        self.watch: watch_session.Watch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Start watching, once a checkpoint's state is loaded."""
        if not state.is_world_process_zero:
            return
        self.watch = run_start.watch(
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
        """Log metrics of evaluations and of TRL; loss, norm and learning rate are in the rows."""
        if self.watch and logs:
            self.watch.log({name: v for name, v in logs.items() if not _is_recorded(name)})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Finish the run. (An exception ends the process, and is handled as in any script.)"""
        if self.watch:
            self.watch.finish()


def _is_recorded(name: str) -> bool:
    """Return whether a value is a row's, or one of the summary at the end of a training."""
    is_row = name in ("loss", "grad_norm", "learning_rate")
    return is_row or name.startswith("train_") or name == "total_flos"
