"""Lightning: `Trainer(callbacks=[halfstep.lightning.Watch()])`.

All of a step is heard from torch's own scaler and optimizers; this callback only says which they
are, what the run is called, where it resumes, and when it ends.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from halfstep.session import watch_session


class Watch(Callback):  # type: ignore[misc]
    """Watches one fit. Takes what halfstep.watch takes."""

    def __init__(self, **named: Any) -> None:
        self._named = named
        self.watch: watch_session.Watch | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, once optimizers, scaler and a checkpoint's state are in place."""
        if not trainer.is_global_zero:
            return
        scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
        self.watch = watch_session.watch(
            pl_module,
            **{"optimizers": trainer.optimizers, "scaler": scaler, "config": pl_module.hparams}
            | self._named,
        )
        if trainer.global_step:
            self.watch.resume(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End it."""
        if self.watch:
            self.watch.finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End it with the exception's traceback."""
        if self.watch:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)
