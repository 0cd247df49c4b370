"""DeepSpeed: `halfstep.deepspeed.watch(engine)`, after `deepspeed.initialize`.

DeepSpeed scales and skips by itself, and waits for the device to do so: scale and overflow are host
numbers, read from the engine's optimizer around this engine's wrapped `step`. With ZeRO 1 and 2 the
gradients are this rank's partition; with ZeRO 3 no gradients are read, and there is no norm. With
`torch_autocast` the scaler is torch's.
"""

import functools
from typing import Any

from halfstep.session import run_start, watch_session


def watch(engine: Any, **named: Any) -> watch_session.Watch:
    """Watch an engine. Takes the arguments of halfstep.watch."""
    watched = run_start.watch(engine.module, **{"config": engine.config} | named)
    if watched.files is not None and not _has_torchs_scaler(engine):
        watched._guard(lambda: _listen(watched, engine))
    return watched


def _listen(watched: watch_session.Watch, engine: Any) -> None:
    from halfstep.watching.external_scaler import ExternalScaler

    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    external = ExternalScaler(watched, type(inner).__name__)
    external.leave_out(inner)
    backward, step, guard = engine.backward, engine.step, watched._guard

    places = {
        parameter: _Place(parameter)
        for parameter in engine.module.parameters()
        if parameter.requires_grad
    }
    names: dict[Any, str] = watched._loop.state.names
    names |= {place: names[parameter] for parameter, place in places.items() if parameter in names}

    def measure() -> None:
        partitioned = _partition(optimizer)
        for parameter, place in places.items():
            place.grad = parameter.grad if partitioned is None else partitioned.get(parameter)
        external.gradients(list(places.values()), _scale(optimizer), inner.param_groups[0]["lr"])

    def report() -> None:
        external.on_decision(bool(getattr(optimizer, "overflow", False)))
        external.on_update(_scale(optimizer))

    @functools.wraps(backward)
    def going_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        guard(external.loss, loss)
        return backward(loss, *args, **kwargs)

    @functools.wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        is_last = engine.is_gradient_accumulation_boundary()
        if is_last:
            guard(measure)
        result = step(*args, **kwargs)
        if is_last:
            guard(report)
        return result

    engine.backward, engine.step = going_backward, stepping


class _Place:
    """A parameter with its gradient from wherever the engine stores it."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.grad: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)


def _partition(optimizer: Any) -> dict[Any, Any] | None:
    """Return this rank's gradients by parameter, if ZeRO 1 or 2 moved them off the parameters."""
    gradients = getattr(optimizer, "averaged_gradients", None)
    if gradients is None:
        return None
    return {
        parameter: gradient
        for i, group in gradients.items()
        for parameter, gradient in zip(optimizer.params_in_partition[i], group or [], strict=False)
    }


def _scale(optimizer: Any) -> float:
    """Return the loss scale, whose attribute depends on the optimizer's class; 1 if it has none."""
    scaler = getattr(optimizer, "loss_scale_config", optimizer)
    return float(getattr(scaler, "cur_scale", 1.0))


def _has_torchs_scaler(engine: Any) -> bool:
    of_zero = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return (of_zero or getattr(engine, "torch_autocast_z0_gradscaler", None)) is not None
