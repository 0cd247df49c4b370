"""Keras on torch: `model.fit(..., callbacks=[halfstep.keras.Watch()])`.

Keras scales and skips by itself (`LossScaleOptimizer`). Its optimizer is observed by wrapping the
methods `scale_loss`, `check_finite` and `apply` of this one optimizer during training.
"""

from collections.abc import Mapping
from typing import Any

import keras
import torch

from halfstep.session import run_start, watch_session
from halfstep.session.stderr import say


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that watches one fit. Takes the arguments of halfstep.watch."""

    def __init__(self, **named: Any) -> None:
        super().__init__()
        self._named = named
        self._wrapped: list[tuple[Any, str]] = []
        self.watch: watch_session.Watch | None = None

    def on_train_begin(self, logs: Mapping[str, object] | None = None) -> None:
        """Start watching, once the optimizer exists."""
        if keras.backend.backend() != "torch":
            say(f"Keras uses the backend {keras.backend.backend()}; only torch is supported")
            return
        self.watch = run_start.watch(**self._named)
        if self.watch.files is None:
            return
        self.watch._guard(self._listen, self.watch)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Log Keras's metrics of the epoch, except the loss, which is recorded for each step."""
        if self.watch and logs:
            self.watch.log({name: value for name, value in logs.items() if name != "loss"})

    def on_train_end(self, logs: Mapping[str, object] | None = None) -> None:
        """Finish the run. (An exception ends the process, and is handled as in any script.)"""
        for optimizer, name in self._wrapped:
            vars(optimizer).pop(name, None)
        self._wrapped.clear()
        if self.watch:
            self.watch.finish()

    def _listen(self, watch: watch_session.Watch) -> None:
        from halfstep.watching.external_scaler import ExternalScaler

        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        watch._loop.state.names |= {
            variable.value: variable.path.replace("/", ".") for variable in variables
        }
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        external = ExternalScaler(watch, type(inner).__name__)
        guard = watch._guard
        scale_loss, apply = optimizer.scale_loss, optimizer.apply
        check_finite: Any = getattr(optimizer, "check_finite", None)

        def scale() -> Any:
            own = getattr(optimizer, "dynamic_scale", None) if optimizer.built else None
            return (inner.loss_scale_factor or 1.0) if own is None else own.value

        def measure(trainable_variables: Any) -> None:
            parameters = [variable.value for variable in trainable_variables or variables]
            external.gradients(parameters, scale(), _rate(inner))
            if check_finite is None:
                external.on_decision(False)

        def scaling(loss: Any) -> Any:
            guard(external.loss, loss)
            return scale_loss(loss)

        def checking(grads: Any) -> Any:
            finite = check_finite(grads)
            guard(lambda: external.on_decision(~finite))
            return finite

        def applying(grads: Any, trainable_variables: Any = None) -> None:
            guard(measure, trainable_variables)
            apply(grads, trainable_variables)
            guard(lambda: external.on_update(scale()))

        wraps = {"scale_loss": scaling, "apply": applying}
        if check_finite is not None:
            wraps["check_finite"] = checking
        for name, wrap in wraps.items():
            object.__setattr__(optimizer, name, wrap)
            self._wrapped.append((optimizer, name))


def _rate(optimizer: Any) -> Any:
    """Return the learning rate of the next step: a number, or a device tensor."""
    rate = optimizer.learning_rate
    value = getattr(rate, "value", rate)
    return value if isinstance(value, torch.Tensor) else float(value)
