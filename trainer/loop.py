"""The training loop: steps, evaluation, checkpoints, rollback and control requests.

    halfstep recipe train digits --precision fp16 --set training.steps=100
    halfstep recipe train --help

It runs without a server or database. Telemetry goes to two callbacks, `on_steps` and `on_event`;
control requests come from a third, `control`, polled at step boundaries. The step itself is
trainer.step, the set-up trainer.setup.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfstep.telemetry.events import Metric, RequestDone
from trainer.checkpoints.checkpoint import Progress
from trainer.checkpoints.resume import go_back_to
from trainer.distributed.ranks import Control
from trainer.evaluation import evaluate, evaluate_average, make_artifacts
from trainer.observers import best_effort
from trainer.setup import Run
from trainer.step import all_skipped, retry_in_fp32, train_step
from trainer.stopwatch import Stopwatch

Stop = Literal["cancel", "pause", "preempt"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a training."""

    status: Literal["finished", "cancelled", "paused", "preempted"]
    step: int  # the last attempted


STATUS_OF_STOP: dict[str | None, Any] = {
    None: "finished",
    "cancel": "cancelled",
    "pause": "paused",
    "preempt": "preempted",
}


def train(
    run: Run, *, control: Callable[[], Control] = Control, seconds_before: float = 0.0
) -> Outcome:
    """Train until the last step or a requested stop, after which a checkpoint is saved too.

    seconds_before: training time of earlier attempts.
    Raises ConfigError, RecipeError or CheckpointError for errors of the user.
    """
    training, telemetry = run.config.training, run.step_observers.telemetry
    stopwatch = Stopwatch(run.prepared.device, seconds_before)
    step, retried = run.progress.step, run.progress.retried
    stop: str | None = None
    if run.config.evaluation.at_start and step == 0:
        _report(run, step, evaluate(run.context.recipe, run.context.autocast))
    first = step + 1
    # Even if a step raises, telemetry flushes its ring and files are finished.
    with run.saver, telemetry, run.step_observers.logged, run.context.batches:
        while step < training.steps and stop is None:
            step += 1
            retried += _attempt(run, step)
            if step == first and run.config.checkpoints.every_steps is not None:
                run.saver.prepare()
            if back := _roll_back(run, step):
                step, retried = back.step, back.retried
                continue
            is_last = step == training.steps
            if is_last or _is_due(run.config.evaluation.every_steps, step):
                _evaluate(run, step)
            stop = _boundary(run, step, retried, control, is_last=is_last)
            # Checks only steps already on the host, so device and disk failures surface late.
            run.step_observers.stop_rule.check()
            run.saver.check()

    _report(run, step, stopwatch.metrics())
    return Outcome(STATUS_OF_STOP[stop], step)


def _attempt(run: Run, step: int) -> bool:
    """Attempt a step; return whether it was applied only by a retry in fp32.

    Everything up to `tick` queues work on the device and returns: the host runs some steps ahead,
    and reads a step's telemetry when its row arrives.
    """
    context, training, schedule, ema = run.context, run.config.training, run.schedule, run.ema
    observers, telemetry = context.observers, run.step_observers.telemetry
    schedule.apply(step)
    if training.compile and training.compile_mode != "default":
        # Outputs of the previous step's graphs are no longer used.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    observers.before_step(step)
    run.buffer_rule.keep()
    batches: Iterable[Any] = context.batches.step()
    may_retry = run.config.scaler.retry_in_fp32
    if may_retry:
        batches = list(batches)  # they may be read twice
    result = train_step(context, batches)
    run.buffer_rule.restore(update.found_inf for update in result.updates.values())
    with torch.no_grad():
        context.recipe.after_step()
    found_inf = {name: result.updates[name].found_inf for name in result.stepped}
    schedule.count(found_inf)
    if ema is not None:
        ema.update(found_inf)

    is_retried = False
    # The only policy for which the host waits in every step: it has to know of a skip at once.
    if may_retry and all_skipped(result):
        observers.before_update()
        second = retry_in_fp32(context, batches, step, run.prepared.device)
        run.on_event(second)
        is_retried = second.applied
        if ema is not None and is_retried:
            ema.update(dict.fromkeys(found_inf, 0.0))
    telemetry.tick(context.batches.waited_seconds)
    return is_retried


def _roll_back(run: Run, step: int) -> Progress | None:
    """Roll back to the checkpoint before a spike of the loss, if enabled; return its progress.

    The host waits here, at fixed steps, to know of a spike by then.
    """
    if not run.rollback.is_due(step):
        return None
    context = run.context
    context.observers.drain()
    if not (checkpoint := run.rollback.poll(run.saver.finish)):
        return None
    progress = go_back_to(checkpoint, run.prepared, run.peaks, run.parts, context.graph)
    run.schedule, run.step_observers.telemetry.skipped = run.parts["schedule"], progress.skipped
    run.rollback.report(progress, step, context.batches, run.on_event)
    return progress


def _evaluate(run: Run, step: int) -> None:
    """Report the evaluation's metrics, also of the averaged weights, and save artifacts."""
    recipe, autocast = run.context.recipe, run.context.autocast
    run.context.observers.drain()  # the evaluation waits for the device anyway
    metrics = evaluate(recipe, autocast)
    if run.ema is not None:
        with best_effort("evaluation of the average", step, run.on_event):
            metrics |= evaluate_average(run.ema, recipe, autocast, run.prepared.device)
    _report(run, step, metrics)
    with best_effort("creation of artifacts", step, run.on_event):
        run.saver.save_artifacts(step, make_artifacts(recipe, autocast))


def _boundary(
    run: Run, step: int, retried: int, control: Callable[[], Control], *, is_last: bool
) -> str | None:
    """Apply control requests at a step boundary, and save if due; return the stop.

    All ranks are at the same step, and the weights are those after a whole update.
    """
    context, observers, on_event = run.context, run.context.observers, run.on_event
    agreed = context.ranks.agree(control)
    stop, request = None if is_last else agreed.stop, agreed.request
    if request and request.kind == "scale":  # first, so that a checkpoint contains it
        run.step_observers.telemetry.before_scale_is_set()
        context.scale_rule.set(context.scaler, request.value)  # queued on the device
        on_event(RequestDone(step=step, request=request.id))
    requested = request.id if request and request.kind == "checkpoint" else None
    is_due = _is_due(run.config.checkpoints.every_steps, step)
    if is_last or stop or requested is not None or is_due:
        # The host waits for the device here, to know the number of skipped steps. It waits neither
        # for the copy of the weights nor for the disk.
        observers.drain()
        reason = "end" if is_last else stop or ("interval" if requested is None else "request")
        skipped = run.step_observers.telemetry.skipped
        progress = Progress(step, skipped, context.batches.position, retried)
        run.saver.save(progress, reason=reason, request=requested)
    if request and request.kind == "replay":
        observers.drain()  # so that the scale of a past skip is known
        with best_effort("replay", step, on_event):
            run.step_observers.replay.request(int(request.value), request.id)
    if request and request.kind == "precision_diff":
        observers.drain()
        with best_effort("precision diff", step, on_event):
            run.step_observers.precision_diffs.request(step, request.id)
    return stop


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


def _report(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    elapsed_ms = run.step_observers.telemetry.elapsed_ms()
    for name, value in metrics.items():
        run.on_event(Metric(step=step, name=name, value=value, elapsed_ms=elapsed_ms))
