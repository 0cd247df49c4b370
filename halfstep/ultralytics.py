"""Ultralytics: `halfstep.ultralytics.watch(model)`, before `model.train(...)`.

Steps are observed through torch's own scaler and optimizer; these callbacks only pass those, the
run's name and configuration, and finish the run.
"""

from typing import Any

from halfstep.session import run_start, watch_session


def watch(model: Any, **named: Any) -> None:
    """Watch all further trainings of a model. Takes the arguments of halfstep.watch."""
    for event, callback in _Training(named).callbacks().items():
        model.add_callback(event, callback)


class _Training:
    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named
        self._watch: watch_session.Watch | None = None

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_train_start": self._begin,
            "on_fit_epoch_end": self._log,
            "on_train_end": self._end,
        }

    def _begin(self, trainer: Any) -> None:
        """Start watching, once optimizer, scaler and a checkpoint's state are loaded."""
        scaler = trainer.scaler if trainer.scaler.is_enabled() else None
        self._watch = run_start.watch(
            trainer.model,
            **{
                "optimizers": [trainer.optimizer],
                "scaler": scaler,
                "config": vars(trainer.args),
                "name": trainer.args.name,
            }
            | self._named,
        )

    def _log(self, trainer: Any) -> None:
        """Log the metrics of an epoch's validation."""
        if self._watch:
            self._watch.log(dict(trainer.metrics or {}))

    def _end(self, trainer: Any) -> None:
        """Register the checkpoint files and finish. (An exception is handled as in any script.)"""
        if self._watch is None:
            return
        for path in (trainer.last, trainer.best):
            if path.exists():
                self._watch.checkpoint(path)
        self._watch.finish()
        self._watch = None
