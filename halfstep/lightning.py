"""Lightning: `Trainer(callbacks=[halfstep.lightning.Watch()])`.

Steps are observed through torch's own scaler and optimizers; this callback only passes those, the
run's name and the step to resume from, and finishes the run.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from halfstep.session import run_start, watch_session


class Watch(Callback):  # type: ignore[misc]
    """Callback that watches one fit. Takes the arguments of halfstep.watch."""

    def __init__(self, **named: Any) -> None:
        self._named = named
        self.watch: watch_session.Watch | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching, once optimizers, scaler and a checkpoint's state are loaded."""
        if not trainer.is_global_zero:
            return
        scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
        self.watch = run_start.watch(
            pl_module,
            **{"optimizers": trainer.optimizers, "scaler": scaler, "config": pl_module.hparams}
            | self._named,
        )
        if trainer.global_step:
            self.watch.resume(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the run."""
        if self.watch:
            self.watch.finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finish the run with the exception's traceback."""
        if self.watch:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)
