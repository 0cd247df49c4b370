"""DeepSpeed: `halfstep.deepspeed.watch(engine)`, after `deepspeed.initialize`.

DeepSpeed scales and skips by itself, and waits for the device to do so: scale and overflow are
numbers of the host, read off the engine's optimizer around `engine.step`, which is wrapped on this
one engine. Where gradients are partitioned (ZeRO), no parameter has one when it is looked: norm and
culprits are those of the gradients that are there. With `torch_autocast` the scaler is torch's.
"""

import functools
from typing import Any

from halfstep import watching


def watch(engine: Any, **named: Any) -> watching.Watch:
    """Watch an engine. Takes what halfstep.watch takes."""
    watched = watching.watch(engine.module, **{"config": engine.config} | named)
    if watched.files is not None and not _has_torchs_scaler(engine):
        watched._guard(lambda: _listen(watched, engine))
    return watched


def _listen(watched: watching.Watch, engine: Any) -> None:
    from halfstep.foreign import Foreign

    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    foreign = Foreign(watched, type(inner).__name__)
    foreign.leave_out(inner)
    backward, step, guard = engine.backward, engine.step, watched._guard

    def measure() -> None:
        parameters = [each for each in engine.module.parameters() if each.requires_grad]
        foreign.gradients(parameters, _scale(optimizer), inner.param_groups[0]["lr"])

    def tell() -> None:
        foreign.decided(bool(getattr(optimizer, "overflow", False)))
        foreign.updated(_scale(optimizer))

    @functools.wraps(backward)
    def going_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        guard(foreign.loss, loss)
        return backward(loss, *args, **kwargs)

    @functools.wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        is_last = engine.is_gradient_accumulation_boundary()
        if is_last:
            guard(measure)
        result = step(*args, **kwargs)
        if is_last:
            guard(tell)
        return result

    engine.backward, engine.step = going_backward, stepping


def _scale(optimizer: Any) -> float:
    """Return the loss scale, wherever this kind of optimizer keeps it; 1 if it has none."""
    keeper = getattr(optimizer, "loss_scale_config", optimizer)
    return float(getattr(keeper, "cur_scale", 1.0))


def _has_torchs_scaler(engine: Any) -> bool:
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None
