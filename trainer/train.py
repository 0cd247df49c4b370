"""The training loop, and mixed precision as it should be done. Read it from top to bottom.

    halfstep recipe train digits --precision fp16 --set training.steps=100
    halfstep recipe train --help

It runs by itself: no server, no database. What it measures goes to two callbacks, `on_steps` and
`on_event`; what the outside wants comes from one, `control`, asked between steps.

Shapes: B examples in a micro-batch, A micro-batches in a step, P parameters of an optimizer.
Counts: an *attempted* step is the step number; the scaler skips some; the others are *applied*.
Where the host waits for the device: where a comment says so, and nowhere else. In a step, nowhere.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.clock import clock
from halfstep.config_groups import Scaler, Training
from halfstep.recipe import Loss, Recipe, RecipeError
from halfstep.run_config import RunConfig
from halfstep.telemetry.spool import Event, Steps
from trainer.checkpoints.checkpoint import Progress
from trainer.checkpoints.checkpointing import Saver
from trainer.checkpoints.initial_weights import start_from_weights
from trainer.checkpoints.resume import go_back_to, go_on_from, load_parts
from trainer.checkpoints.rollback import Rollback
from trainer.data.batches import Batches
from trainer.data.sampler import Sampler, check_batch
from trainer.data.sources import make_sources
from trainer.diagnosis import shapes
from trainer.diagnosis.fp8_ranges import Fp8Ranges
from trainer.diagnosis.headroom import Headroom
from trainer.diagnosis.histogram import Histogram
from trainer.diagnosis.lost_updates import Updates
from trainer.diagnosis.missing_gradients import MissingGradients
from trainer.diagnosis.nonfinite_buffers import NonfiniteBuffers
from trainer.diagnosis.replay import Replay
from trainer.diagnosis.spikes import Spikes
from trainer.diagnosis.unused_modules import UnusedModules
from trainer.distributed.averaging import AveragingCheck
from trainer.distributed.ranks import Control, Ranks
from trainer.distributed.shards import check_one_loss
from trainer.ema import Ema
from trainer.evaluation import evaluate, evaluate_average, make_artifacts
from trainer.logged_values import Logged
from trainer.observers import Observers, best_effort
from trainer.optimizers import (
    StepResult,
    Update,
    WatchedOptimizer,
    prepare_momentum,
    watched_optimizers,
)
from trainer.precision.buffers import BufferRule
from trainer.precision.scale_policies import ScaleRule, StopRule
from trainer.repeatability import seed_everything
from trainer.schedule import make_schedule, peak_rates
from trainer.setup import compiled, make_recipe, set_up_process, transform, with_steps_of_epochs
from trainer.stopwatch import Stopwatch
from trainer.telemetry import Telemetry
from trainer.workload import workload


@dataclass(frozen=True)
class StepContext:
    """What every step works with."""

    recipe: Recipe
    batches: Batches
    autocast: torch.autocast
    scaler: GradScaler
    scale_rule: ScaleRule
    optimizers: Mapping[str, WatchedOptimizer]
    training: Training
    ranks: Ranks
    observers: Observers

    def passes(
        self,
        batches: Iterable[Any],
        forward: Callable[[], AbstractContextManager[Any]],
        ranks: Ranks,
    ) -> Iterator[tuple[int, tuple[Loss, ...]]]:
        """Go forward through the micro-batches of a step; see forward_passes."""
        return forward_passes(self.recipe, batches, self.training, forward, ranks)

    def parameters(self, loss: Loss) -> list[Tensor]:
        """Return the parameters that a loss trains, those of all its optimizers."""
        return [p for name in loss.optimizers for p in self.optimizers[name].parameters]


@dataclass(frozen=True)
class Followers:
    """Who follows every step; all of them are the rig's observers."""

    stop_rule: StopRule
    replay: Replay
    histogram: Histogram
    headroom: Headroom
    fp8_ranges: Fp8Ranges
    spikes: Spikes
    updates: Updates
    telemetry: Telemetry
    logged: Logged
    uncalled: UnusedModules
    poison: NonfiniteBuffers  # after telemetry, whose drained rows it needs
    missing_gradients: MissingGradients


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Literal["finished", "cancelled", "paused", "preempted"]
    step: int  # the last attempted


STATUS_OF_STOP: dict[str | None, Any] = {
    None: "finished",
    "cancel": "cancelled",
    "pause": "paused",
    "preempt": "preempted",
}


def train(
    recipe_class: type[Recipe],
    config: RunConfig[Any],
    *,
    device: torch.device,
    on_steps: Callable[[Steps], None],
    on_event: Callable[[Event], None],
    control: Callable[[], Control] = Control,
    checkpoint_folder: Path | None = None,
    artifact_folder: Path | None = None,
    resume: Path | None = None,
    weights: Mapping[str, Path] | None = None,
    started_at: float | None = None,
    seconds_before: float = 0.0,
    ranks: Ranks | None = None,
    is_checked: bool = False,
) -> Outcome:
    """Train until the last step or until told to stop, which leaves a checkpoint as well.

    on_steps, on_event: are called one at a time, by a thread that saves as well as by this one.
    started_at: when the run was first started, by halfstep.clock.  seconds_before: that earlier
    attempts have trained.  checkpoint_folder: None saves nothing.
    artifact_folder: None for `artifacts` within that.
    weights: files to start from where there is nothing to resume, see load_weights; None: what
    weights.path names.  is_checked: what to resume is known to be as it was saved.
    Raises ConfigError, RecipeError, CheckpointError or WeightsError for what the user can put
    right.
    """
    ranks = ranks or Ranks()
    started_at = clock() if started_at is None else started_at
    on_steps, on_event = one_at_a_time(on_steps, on_event)
    training = config.training
    if ranks.rank > 0:  # one process writes the run's history
        on_steps, on_event = _ignore, _ignore

    # ---- Setup: the same bits each time -------------------------------------------------------
    device = set_up_process(device, training)
    recipe = make_recipe(recipe_class, config, device)  # draws the initial weights
    check_batch(training, recipe.train_size, recipe.name, ranks.world_size)
    if training.epochs is not None:
        config = with_steps_of_epochs(config, recipe.train_size, ranks.world_size)
        training = config.training
        on_event({"event": "length", "step": 0, "steps": training.steps})
    seed_everything(training.seed + ranks.rank)  # each rank has its own dropout from here on

    # DistributedDataParallel replaces the modules that the recipe calls; these are the plain ones.
    # (With training.parallel fsdp they stay, and each rank keeps a part of their weights.)
    modules = dict(recipe.modules)
    if resume is None:
        start_from_weights(weights, modules, config, on_event)
    transform(modules, recipe.optimizers, config, device)
    recipe.modules = ranks.wrap(modules, recipe.optimizers, config, device)
    if training.compile:  # outermost, so that the compiler can overlap DDP's communication
        recipe.modules = {name: compiled(m, training) for name, m in recipe.modules.items()}
    peaks = peak_rates(recipe.optimizers)

    # ---- Mixed precision, and who follows it --------------------------------------------------
    context, followers = make_context(
        recipe, modules, config, device, ranks, on_steps=on_steps, on_event=on_event, at=started_at
    )
    autocast, scaler, scale_rule = context.autocast, context.scaler, context.scale_rule
    batches, observers, telemetry = context.batches, context.observers, followers.telemetry

    # ---- Going on from a checkpoint -----------------------------------------------------------
    progress = Progress()
    inherited: Mapping[str, Any] = {}
    if resume is not None:
        # By rank 0's word: on other machines it lies elsewhere than where they save.
        is_fork = ranks.gather(checkpoint_folder not in (None, resume.parent))[0]
        progress, inherited, notes = go_on_from(
            *(resume, recipe, modules, config, device, batches, ranks),
            is_fork=is_fork,
            is_checked=is_checked,
        )
        on_event({"event": "resumed", "step": progress.step, "exact": not notes, "notes": notes})
    step, retried = progress.step, progress.retried

    # Only now: loading an optimizer's state replaces its groups.
    schedule = make_schedule(training, recipe.optimizers, peaks, device)

    telemetry.skipped = progress.skipped
    with best_effort("count of the work", 0, on_event):
        on_event(workload(recipe, config, device, ranks.world_size))
    with best_effort("look at the shapes", 0, on_event):
        if misfits := shapes.misfits(modules, config):
            on_event(misfits)

    # What counts steps counts on: none of it decides a bit of the next step, but the scale's rule.
    parts: dict[str, Any] = {"scale_rule": scale_rule, "schedule": schedule, **observers.members}
    ema = Ema(training.ema_decay, modules, context.optimizers) if training.ema_decay else None
    if ema is not None:
        parts["ema"] = ema
    load_parts(parts, inherited)
    del inherited  # the last of the checkpoint, which is let go of before the first step
    is_restored = config.scaler.restore_buffers and scaler.is_enabled()
    buffer_rule = BufferRule(modules, is_on=is_restored)
    saver = Saver(
        checkpoint_folder,
        recipe,
        modules,
        batches,
        config,
        device,
        ranks,
        parts,
        on_event,
        artifact_folder,
    )
    followers.logged.save = saver.save_artifacts

    rollback_to_checkpoint = Rollback(config, followers.spikes, checkpoint_folder, ranks)

    # ---- The loop -----------------------------------------------------------------------------
    stopwatch = Stopwatch(device, seconds_before)
    stop = None
    if config.evaluation.at_start and step == 0:
        _report(evaluate(recipe, autocast), step, telemetry.elapsed_ms(), on_event)
    first = step + 1
    # Even if a step raises, telemetry hands over what is left in its ring, and files are finished.
    with saver, telemetry, followers.logged, batches:
        while step < training.steps and stop is None:
            step += 1

            # Everything from here to `tick` queues work on the device and returns: the host is
            # some steps ahead of it, and learns what they were like when their rows arrive.
            schedule.apply(step)
            if training.compile and training.compile_mode != "default":
                # What the graphs of the step before have written is done with.
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            observers.before_step(step)
            buffer_rule.keep()
            drawn: Iterable[Any] = batches.step()
            if config.scaler.retry_in_fp32:
                drawn = list(drawn)  # they may be wanted twice
            result = train_step(context, drawn)
            buffer_rule.restore(update.found_inf for update in result.updates.values())
            with torch.no_grad():
                recipe.after_step()
            found_inf = {name: result.updates[name].found_inf for name in result.stepped}
            schedule.count(found_inf)
            if ema is not None:
                ema.update(found_inf)
            observers.after_step(result)

            # The one policy for which the host waits in every step: it has to know of a skip now.
            if config.scaler.retry_in_fp32 and all_skipped(result):
                observers.before_update()
                second = retry_in_fp32(context, drawn, step, device)
                on_event(second)
                retried += second["applied"]
                if ema is not None and second["applied"]:
                    ema.update(dict.fromkeys(found_inf, 0.0))
            telemetry.tick(batches.waited_seconds)
            if step == first and config.checkpoints.every_steps is not None:
                saver.prepare()

            # With spike.rollback the host waits here, at fixed steps, to know of a spike by then.
            if rollback_to_checkpoint.is_due(step):
                observers.drain()
                if back := rollback_to_checkpoint.look(saver.finish):
                    progress = go_back_to(
                        back, recipe, modules, config, device, ranks, peaks, parts
                    )
                    schedule, telemetry.skipped = parts["schedule"], progress.skipped
                    rollback_to_checkpoint.tell(progress, step, batches, on_event)
                    step, retried = progress.step, progress.retried
                    continue

            is_last = step == training.steps
            if is_last or _is_due(config.evaluation.every_steps, step):
                observers.drain()  # evaluating waits for the device anyway
                metrics = evaluate(recipe, autocast)
                if ema is not None:
                    with best_effort("evaluation of the average", step, on_event):
                        metrics |= evaluate_average(ema, recipe, autocast, device)
                _report(metrics, step, telemetry.elapsed_ms(), on_event)
                with best_effort("making of artifacts", step, on_event):
                    saver.save_artifacts(step, make_artifacts(recipe, autocast))

            # A step boundary: all ranks are at the same step, and the weights are those of a whole
            # number of updates. So this is where the outside is heard.
            wanted = ranks.agree(control)
            stop, request = None if is_last else wanted.stop, wanted.request
            if request and request.kind == "scale":  # first, so that a checkpoint has it
                scale_rule.set(scaler, request.value)  # a fill, queued like everything else
                on_event({"event": "obeyed", "step": step, "request": request.id})
            asked = request.id if request and request.kind == "checkpoint" else None
            is_due = _is_due(config.checkpoints.every_steps, step)
            if is_last or stop or asked is not None or is_due:
                # The host waits for the device here, to know how many steps were skipped. It does
                # not wait for the copy of the weights, nor for the disk.
                observers.drain()
                reason = "end" if is_last else stop or ("interval" if asked is None else "request")
                at = Progress(step, telemetry.skipped, batches.position, retried)
                saver.save(at, reason=reason, request=asked)
            if request and request.kind == "replay":
                observers.drain()  # so that the scale of a past skip is known, whenever it came
                with best_effort("replay", step, on_event):
                    followers.replay.request(int(request.value), request.id)
            # Of the steps that have arrived: a device's bad news come late. So do a disk's.
            followers.stop_rule.check()
            saver.check()

    _report(stopwatch.metrics(), step, telemetry.elapsed_ms(), on_event)
    return Outcome(STATUS_OF_STOP[stop], step)


def make_context(
    recipe: Recipe,
    modules: Mapping[str, nn.Module],
    config: RunConfig[Any],
    device: torch.device,
    ranks: Ranks,
    *,
    on_steps: Callable[[Steps], None],
    on_event: Callable[[Event], None],
    at: float,
) -> tuple[StepContext, Followers]:
    """Make what every step works with, and have all that follows a run follow it.

    modules: the recipe's, without DistributedDataParallel.  at: as started_at in `train`.
    """
    training, diagnosis = config.training, config.diagnosis
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    sampler = Sampler(recipe.train_size, training, **place, pin=device.type == "cuda")
    batches = Batches(sampler, *make_sources(recipe, sampler, config, device, tell_of_wait))
    observers = Observers(on_steps, on_event)

    # Mixed precision is two objects with two switches. With both off the same loop is plain fp32,
    # or TF32 if training.tf32 is on.
    autocast = make_autocast(config, device)
    recipe.scaler = scaler = make_scaler(config, device)
    rule = ScaleRule(config.scaler, device)
    is_scaled = scaler.is_enabled()
    optimizers = watched_optimizers(modules, recipe.optimizers, is_scaled=is_scaled)
    if is_scaled:
        prepare_momentum(recipe.optimizers)

    context = StepContext(
        recipe, batches, autocast, scaler, rule, optimizers, training, ranks, observers
    )
    spikes = Spikes(config.spike, on_event)
    headroom = Headroom(modules, config, on_event)
    fp8_ranges = Fp8Ranges(modules, config, on_event)
    telemetry = Telemetry(optimizers, device, training, diagnosis, observers.arrived, on_event, at)
    logged = Logged(device, telemetry.elapsed_ms, on_event)
    recipe.on_log = logged.log

    @contextmanager
    def set_aside() -> Iterator[None]:
        with headroom.set_aside(), fp8_ranges.set_aside(), logged.set_aside():
            yield

    followers = Followers(
        StopRule(config.scaler),
        Replay(context, modules, batches, config, device, on_event, spikes.left_out, set_aside),
        Histogram(optimizers, diagnosis, device, on_event),
        headroom,
        fp8_ranges,
        spikes,
        Updates(optimizers, diagnosis, on_event),
        telemetry,
        logged,
        UnusedModules(modules, config, on_event),
        NonfiniteBuffers(modules, on_event),
        MissingGradients(on_event),
    )
    if training.static_graph and ranks.world_size > 1:
        observers.join(averaging=AveragingCheck(ranks))
    observers.join(**vars(followers))
    return context, followers


def train_step(context: StepContext, batches: Iterable[Any]) -> StepResult:
    """Attempt one step: forward, backward, unscale, clip, step or skip, update the scale.

    The host only queues work here; nothing waits for the device. (The one exception is an unfused
    optimizer under an enabled scaler: `GradScaler.step` then asks the device whether to skip.)
    batches: the micro-batches, taken one by one.
    Source: PyTorch's AMP examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """
    scaler, optimizers, training = context.scaler, context.optimizers, context.training
    # 1 × scale: reads it as a new tensor of the device; get_scale() would wait.
    scale = scaler.scale(context.scale_rule.one)
    loss_sum = torch.zeros_like(scale)  # stays on the device, and is read when its row arrives
    updates = {name: watched.idle for name, watched in optimizers.items()}
    stepped: set[str] = set()
    rounds = 0  # of losses
    for watched in optimizers.values():
        watched.drop_gradients()  # before the forward pass, which can use their memory

    for index, losses in context.passes(batches, lambda: context.autocast, context.ranks):
        names = backward(context, index, losses, loss_sum)
        if index < training.accumulation_steps - 1:
            continue  # gradients add up until the last micro-batch
        if again := stepped.intersection(names):
            raise RecipeError(
                f'training_step yields two losses for optimizer "{min(again)}": add them'
            )
        if not stepped:
            # While replay watches, the host waits in here for the step before, whose weights are
            # about to change; the device has this step's forward and backward queued meanwhile.
            context.observers.before_update()
        stepped.update(names)
        rounds += 1
        for name in names:
            updates[name] = update_weights(context, optimizers[name])

    if not stepped:
        raise RecipeError("training_step yields no loss")
    # Once, after all optimizers: it halves the scale if any of them was skipped. Between two of
    # them it would unscale the second one's gradients by a scale that they were not scaled with.
    found_inf = [update.found_inf for update in updates.values()]
    scale_after = context.scale_rule.update(scaler, scale, found_inf)
    loss = context.ranks.mean_(loss_sum)
    rate = next(iter(optimizers.values())).rate  # as it was applied, whoever set it
    return StepResult(loss, scale, scale_after, updates, stepped, rate, rounds)


def all_skipped(result: StepResult) -> bool:
    """Return whether every optimizer that took part was skipped. The host waits for the device."""
    return all(bool(result.updates[name].found_inf) for name in result.stepped)


def retry_in_fp32(
    context: StepContext, batches: Iterable[Any], step: int, device: torch.device
) -> Event:
    """Attempt the same batches without autocast; return the event that says what came of it.

    The weights are those of the skipped attempt. Dropout draws anew, and BatchNorm counts the
    batch twice. A scaler of scale 1 still skips what is not finite in fp32 either.
    """
    plain = GradScaler(device.type, init_scale=1.0, growth_interval=2**31 - 1)
    off = torch.autocast(device.type, enabled=False)
    scaler, context.recipe.scaler = context.recipe.scaler, plain
    rule = ScaleRule(Scaler(), device)
    alone = Observers(_ignore, _ignore)
    retried = train_step(
        replace(context, autocast=off, scaler=plain, scale_rule=rule, observers=alone), batches
    )
    context.recipe.scaler = scaler
    norms = torch.stack([update.total_norm for update in retried.updates.values()])
    return {
        "event": "retry",
        "step": step,
        "loss": retried.loss.item(),
        "grad_norm": torch.linalg.vector_norm(norms).item(),
        "applied": not all_skipped(retried),
    }


def forward_passes(
    recipe: Recipe,
    batches: Iterable[Any],
    training: Training,
    forward: Callable[[], AbstractContextManager[Any]],
    ranks: Ranks,
) -> Iterator[tuple[int, tuple[Loss, ...]]]:
    """Go forward through the micro-batches; yield (index, losses), to be back-propagated at once.

    With one optimizer, one after another, so that one micro-batch at a time is in memory. With
    several they advance in lock-step, from one loss to the next: all have to add their gradients
    before the optimizer of that loss steps.  forward: makes the context of a forward pass.
    """
    count = training.accumulation_steps
    started = (recipe.training_step(batch) for batch in batches)
    is_alone = len(recipe.optimizers) == 1
    passes: Iterable[Any] = started if is_alone else list(started)
    while True:
        numbers: list[int] = []
        for index, one_pass in enumerate(passes):
            # With several devices, gradients are averaged over them in the last backward only.
            # (Unscaled first, then averaged, an inf on one of them would be found on that one
            # alone; averaged first, it is in every rank's gradients, and all skip together.)
            with nullcontext() if index == count - 1 else ranks.local_gradients():
                # Autocast is for the forward pass and the loss. backward() runs each operation in
                # the type that autocast chose for it going forward, and stays outside.
                # Matrix products run in fp16 there, sums and losses in fp32; the weights stay in
                # fp32, and each is cast once a pass: leaving the context drops the casts.
                with forward():
                    losses = as_losses(next(one_pass, ()))
                numbers.append(len(losses))
                if losses:
                    yield index, losses
                del losses  # and its graph
        if len(set(numbers)) > 1:
            raise RecipeError(f"training_step yields {numbers} losses in micro-batches of a step")
        if numbers[0] == 0:
            return
        if is_alone:
            with forward():  # the optimizer has stepped: what stands after the yield runs, once
                more = next(one_pass, None)
            if more is None:
                return
            [name] = recipe.optimizers
            raise RecipeError(f'training_step yields two losses for optimizer "{name}": add them')


def backward(
    context: StepContext, index: int, losses: tuple[Loss, ...], loss_sum: Tensor
) -> tuple[str, ...]:
    """Back-propagate losses of one micro-batch, add them to loss_sum; return their optimizers."""
    check_losses(losses, context.optimizers)
    names = tuple(dict.fromkeys(name for loss in losses for name in loss.optimizers))
    for name in names if index == 0 else ():
        # Once more: another optimizer's loss may have left gradients here since.
        context.optimizers[name].drop_gradients()
    for number, loss in enumerate(losses, 1):
        # The mean over micro-batches. Times the scale, so that small gradients do not
        # underflow to 0 in fp16, whose smallest positive number is 2^-24.
        mean_loss = loss.value / context.training.accumulation_steps
        # Of losses yielded together, each reaches the parameters of its own optimizers alone.
        is_for_all = len(loss.optimizers) == len(names)
        own = None if is_for_all else context.parameters(loss)
        is_last = number == len(losses)
        scaled = context.scaler.scale(mean_loss)
        scaled.backward(inputs=own, retain_graph=not is_last)  # type: ignore[no-untyped-call]
        loss_sum += mean_loss.detach()
    return names


def update_weights(context: StepContext, watched: WatchedOptimizer) -> Update:
    """Unscale, clip and step or skip; return what the scaler decided, as tensors of the device."""
    training, scaler = context.training, context.scaler
    # Unscale first: a clip of scaled gradients would cut them by the scale, some 65,536 times
    # too much. inf and NaN are found in the same pass, and kept on the device.
    scaler.unscale_(watched.optimizer)
    # Norms before the clip, for afterwards a NaN in one gradient is a NaN in all of them.
    # A norm of (P,) norms: the same as over all elements at once, in one pass over them.
    norms = watched.gradient_norms()  # (P,)
    total_norm = clipped_norm = torch.linalg.vector_norm(norms)  # 0-dim
    counts = watched.count_nonfinite(norms) if scaler.is_enabled() else None
    context.observers.unscaled(watched)

    if training.max_grad_norm is not None:
        # clip_grad_norm_ in two halves: it would take the same norms again.
        torch.nn.utils.clip_grads_with_norm_(watched.parameters, training.max_grad_norm, total_norm)
    if training.max_grad_value is not None:
        # After the clip by norm: making elements smaller cannot break that bound again.
        watched.check_elements_can_be_clipped()
        torch.nn.utils.clip_grad_value_(watched.parameters, training.max_grad_value)
        clipped_norm = torch.linalg.vector_norm(watched.gradient_norms())

    # A fused optimizer gets found_inf as a tensor and leaves the weights alone if it is 1; an
    # unfused one is not called at all. Either way its moments do not see the step.
    found_inf = watched.step(scaler)
    return Update(found_inf, total_norm, clipped_norm, norms, counts)


def make_autocast(config: RunConfig[Any], device: torch.device) -> torch.autocast:
    """Return the autocast of this precision, of fp8 bf16's; one that is switched off in fp32, and
    where shards are cast as they are gathered.
    """
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    casts = config.precision != "fp32" and config.training.shard_casts == "autocast"
    return torch.autocast(device.type, dtype=dtype, enabled=casts)


def make_scaler(config: RunConfig[Any], device: torch.device) -> GradScaler:
    """Return the scaler, enabled in fp16 only: bf16 has the exponents of fp32.

    The device is always named: `GradScaler()` means cuda, and disables itself where there is none.
    """
    wanted = config.precision == "fp16" and config.scaler.enabled
    # Scale and growth tracker are made on the device with the first loss, and never leave it.
    scaler = GradScaler(
        device.type,
        init_scale=config.scaler.init_scale,
        growth_factor=config.scaler.growth_factor,
        backoff_factor=config.scaler.backoff_factor,
        growth_interval=config.scaler.growth_interval,
        enabled=wanted,
    )
    if scaler.is_enabled() != wanted:
        raise RuntimeError(f"the loss scaler switched itself off on {device}; fp16 needs it")
    return scaler


def as_losses(yielded: Loss | tuple[Loss, ...]) -> tuple[Loss, ...]:
    """Return what training_step yielded at once as a tuple."""
    return (yielded,) if isinstance(yielded, Loss) else tuple(yielded)


def check_losses(losses: tuple[Loss, ...], optimizers: Mapping[str, WatchedOptimizer]) -> None:
    """Raise RecipeError for a loss that cannot be minimised. Asks the host only."""
    for loss in losses:
        for name in loss.optimizers:
            if name not in optimizers:
                known = ", ".join(optimizers)
                raise RecipeError(f'a loss names the optimizer "{name}"; there are {known}')
        if loss.value.dim() != 0:
            # An fp16 tensor with dimensions stays fp16 when scaled, and 65,536 is beyond its range.
            shape = tuple(loss.value.shape)
            names = '", "'.join(loss.optimizers)
            raise RecipeError(f'the loss of "{names}" has shape {shape}: yield its mean')
    if any(watched.shared_with for watched in optimizers.values()):
        check_one_loss([loss.optimizers for loss in losses], optimizers)


def one_at_a_time(
    on_steps: Callable[[Steps], None], on_event: Callable[[Event], None]
) -> tuple[Callable[[Steps], None], Callable[[Event], None]]:
    """Return both so that threads take turns: a save tells of itself while the loop goes on."""
    turn = Lock()

    def in_turn(call: Callable[[Any], None], told: Any) -> None:
        with turn:
            call(told)

    return partial(in_turn, on_steps), partial(in_turn, on_event)


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


def _report(
    metrics: Mapping[str, float], step: int, elapsed_ms: int, on_event: Callable[[Event], None]
) -> None:
    for name, value in metrics.items():
        event = {"event": "metric", "step": step, "name": name, "value": value}
        on_event(event | {"elapsed_ms": elapsed_ms})


def tell_of_wait(sentence: str) -> None:
    """Write to the run's log that it waits for data, and where its workers stand."""
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


def _ignore(_: object) -> None: ...


if __name__ == "__main__":
    from trainer.console import main

    main()
