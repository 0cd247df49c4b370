"""fastai: `Learner(..., cbs=[halfstep.fastai.Watch()])`.

fastai's own optimizers are no classes of torch, so their steps are observed by this callback. Those
of torch (`OptimWrapper`), and a step with torch's scaler (`to_fp16` on a GPU), are observed through
torch. All fits of a learner are one run, except `lr_find`, which is not watched.
"""

from collections.abc import Callable
from typing import Any

from fastai.callback.core import Callback
from fastai.optimizer import OptimWrapper

from halfstep.session import run_start


class Watch(Callback):  # type: ignore[misc]
    """Callback that watches the fits of a learner. Takes the arguments of halfstep.watch."""

    order = 10.5  # after MixedPrecision, before GradientClip

    def __init__(self, **named: Any) -> None:
        super().__init__()
        self._named = named
        self.watched: Any = None  # the Watch, from the first fit on
        self._external: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of an exported learner."""
        return vars(self) | {"watched": None, "_external": None}

    def before_fit(self) -> None:
        """Start watching at the first fit."""
        self.run = not hasattr(self.learn, "lr_finder") and not hasattr(self.learn, "gather_preds")
        if not self.run:
            return
        if self.watched is None:
            config = {"lr": self.learn.lr, "batch_size": getattr(self.dls, "bs", None)}
            self.watched = run_start.watch(self.learn.model, **{"config": config} | self._named)
        self._external = None
        is_of_torch = isinstance(self.learn.opt, OptimWrapper) or _has_scaler(self.learn)
        if self.watched.files is not None and not is_of_torch:
            self._guard(self._listen)

    def after_loss(self) -> None:
        """Record the loss of a training batch."""
        if self._external and self.learn.training:
            self._guard(lambda: self._external.loss(self.learn.loss_grad))

    def before_step(self) -> None:
        """Measure the gradients."""
        if self._external:
            self._guard(self._measure)

    def after_step(self) -> None:
        """Close the step."""
        if self._external:
            self._guard(lambda: self._external.on_update(1.0))

    def after_epoch(self) -> None:
        """Log what the recorder shows of the epoch."""
        self._guard(self._log_epoch)

    def _guard(self, call: Callable[[], None]) -> None:
        if self.watched:
            self.watched._guard(call)

    def _listen(self) -> None:
        from halfstep.watching.external_scaler import ExternalScaler

        self._external = ExternalScaler(self.watched, type(self.learn.opt).__name__)

    def _measure(self) -> None:
        optimizer = self.learn.opt
        parameters = [
            parameter for parameter in optimizer.all_params().itemgot(0) if parameter.requires_grad
        ]
        self._external.gradients(parameters, 1.0, float(optimizer.hypers[-1]["lr"]))
        self._external.on_decision(False)

    def _log_epoch(self) -> None:
        recorder: Any = self.learn.recorder
        shown = zip(recorder.metric_names, recorder.log, strict=False)
        self.watched.log({name: value for name, value in shown if name not in ("epoch", "time")})


def _has_scaler(learn: Any) -> bool:
    scaler = getattr(learn, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())
