"""One step of mixed-precision training of one optimizer. Read it from top to bottom.

`train_step` attempts a step: forward under autocast, backward of the scaled loss, unscale, clip,
step or skip, update of the scale. trainer.loop calls it. Steps of several optimizers are in
trainer.several_losses.

Shapes: B examples in a micro-batch, A micro-batches in a step, P parameters of an optimizer.
Counts: an *attempted* step is the step number; the scaler skips some; the others are *applied*.
The host waits for the device in a step of an unfused optimizer under an enabled scaler, and for
replays (diagnosis.replay_skips): in the step after the scale has grown, and in ten after a skip.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.config_groups import Scaler, Training
from halfstep.recipe import Loss, Recipe, RecipeError
from halfstep.recording.gradients import value_on_host
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Retry
from trainer import several_losses
from trainer.cuda_graph import GraphedSteps
from trainer.data.batches import Batches
from trainer.distributed.ranks import Ranks
from trainer.observers import Observers
from trainer.optimizers import StepResult, Update, WatchedOptimizer
from trainer.precision.scale_policies import ScaleRule
from trainer.several_losses import as_losses, backward


@dataclass(frozen=True)
class StepContext:
    """Objects that every step uses."""

    recipe: Recipe
    batches: Batches
    autocast: torch.autocast
    scaler: GradScaler
    scale_rule: ScaleRule
    optimizers: Mapping[str, WatchedOptimizer]
    training: Training
    ranks: Ranks
    observers: Observers
    graph: GraphedSteps | None = None

    def passes(
        self,
        batches: Iterable[object],
        forward: Callable[[], AbstractContextManager[object]],
        ranks: Ranks,
    ) -> Iterator[tuple[int, tuple[Loss, ...]]]:
        """Run the forward passes of a step's micro-batches; see several_losses."""
        return several_losses.forward_passes(self.recipe, batches, self.training, forward, ranks)

    def parameters(self, loss: Loss) -> list[Tensor]:
        """Return the parameters that a loss trains, those of all its optimizers."""
        return [p for name in loss.optimizers for p in self.optimizers[name].parameters]


def train_step(context: StepContext, batches: Iterable[object]) -> StepResult:
    """Attempt one step: forward, backward, unscale, clip, step or skip, update the scale.

    The host only queues work here; nothing waits for the device. (The one exception is an unfused
    optimizer under an enabled scaler: `GradScaler.step` then asks the device whether to skip.)
    batches: the micro-batches, taken one by one.
    Source: PyTorch's AMP examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """
    if len(context.optimizers) > 1:
        result = several_losses.train_step(context, batches, update_weights)
    elif context.graph is not None:
        result = context.graph.attempt(context, batches, train_step_of_one)
    else:
        result = train_step_of_one(context, batches)
    # The row of the step is queued here, before the scale changes in place.
    context.observers.after_step(result)
    found_inf = [update.found_inf for update in result.updates.values()]
    context.scale_rule.update(context.scaler, found_inf)
    return result


def train_step_of_one(context: StepContext, batches: Iterable[object]) -> StepResult:
    """Attempt the step of the only optimizer, without the update of the scale."""
    training, ranks = context.training, context.ranks
    [(name, watched)] = context.optimizers.items()
    watched.drop_gradients()  # before the forward pass, which can use their memory
    values: list[Tensor] = []  # of the micro-batches' losses
    for index, batch in enumerate(batches, 1):
        one_pass = context.recipe.training_step(batch)
        # With several devices, gradients are averaged only in the last backward pass. (Averaging
        # happens before unscaling, so an inf on one device is in every rank's gradients, and all
        # skip together.)
        is_last = index == training.accumulation_steps
        with nullcontext() if is_last else ranks.local_gradients():
            # Autocast is for the forward pass and the loss. backward() runs each operation in the
            # dtype that autocast chose in the forward pass, and stays outside. Matrix products run
            # in fp16, sums and losses in fp32; the weights stay in fp32, and each is cast once per
            # pass: leaving the context drops the casts.
            with context.autocast:
                losses = as_losses(next(one_pass, ()))
            if not losses:
                raise RecipeError("training_step yields no loss")
            values.append(backward(context, losses))  # gradients add up until the last micro-batch
        del losses  # and their graph
    context.observers.before_update()
    update = update_weights(context, watched)
    several_losses.finish(name, one_pass, context.autocast)
    return StepResult(
        several_losses.step_loss(ranks, values),
        context.scale_rule.scale(context.scaler),
        {name: update},
        {name},
        watched.rate,
    )


def update_weights(context: StepContext, watched: WatchedOptimizer) -> Update:
    """Unscale, clip, and step or skip; return the scaler's decision as device tensors."""
    training, scaler, optimizer = context.training, context.scaler, watched.optimizer
    is_clipped = training.max_grad_norm is not None or training.max_grad_value is not None
    if is_unscaled := is_clipped or watched.has_hooks:
        # Unscale first: a clip of scaled gradients would reduce them by the scale, e.g. 65,536
        # times too much. inf and NaN are detected in the same pass, and stay on the device.
        scaler.unscale_(optimizer)
    # Norms before the clip, because afterwards one NaN has spread to all gradients. Without a clip
    # they include the scale, by which a fused optimizer divides the gradients as it reads them.
    factor = watched.one if is_unscaled else context.scale_rule.scale(scaler)
    context.observers.before_clip(watched, factor)
    norms = watched.idle.norms
    if is_clipped or watched.takes_norms:
        norms = watched.gradient_norms()
    else:
        factor = watched.unknown
    clipped_norm, counts = None, None
    if is_clipped:
        # clip_grad_norm_ in two parts, to avoid computing the norms twice: the norm of the norms
        # equals the norm over all elements.
        total_norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        norm = value_on_host(total_norm) if scaler.is_enabled() else None
        if norm is not None and not math.isfinite(norm):
            counts = watched.count_nonfinite(norms)
        if training.max_grad_norm is not None:
            limit = training.max_grad_norm
            torch.nn.utils.clip_grads_with_norm_(watched.parameters, limit, total_norm)
        if training.max_grad_value is not None:
            # After the clip by norm: smaller elements cannot exceed that bound.
            watched.check_elements_can_be_clipped()
            torch.nn.utils.clip_grad_value_(watched.parameters, training.max_grad_value)
            clipped_norm = torch.linalg.vector_norm(torch.stack(list(watched.gradient_norms())))

    # A fused optimizer gets found_inf as a tensor, and leaves the weights unchanged if it is 1; an
    # unfused one is not called at all. Either way its moments are unchanged.
    found_inf = watched.step(scaler)
    if not is_clipped and scaler.is_enabled() and value_on_host(found_inf):
        counts = watched.count_nonfinite(norms)
    return Update(found_inf, norms, factor, clipped_norm, counts)


def all_skipped(result: StepResult) -> bool:
    """Return whether every optimizer that took part was skipped. The host waits for the device."""
    return all(bool(result.updates[name].found_inf) for name in result.stepped)


def retry_in_fp32(
    context: StepContext, batches: Iterable[object], step: int, device: torch.device
) -> Retry:
    """Attempt the same batches without autocast; return the event with the result.

    The weights are those of the skipped attempt. Dropout draws new masks, and BatchNorm counts the
    batch twice. A scaler of scale 1 still skips what is not finite in fp32 either.
    """
    plain = GradScaler(device.type, init_scale=1.0, growth_interval=2**31 - 1)
    off = torch.autocast(device.type, enabled=False)
    scaler, context.recipe.scaler = context.recipe.scaler, plain
    rule = ScaleRule(Scaler(), device)
    unobserved = Observers(lambda _: None, lambda _: None)
    for watched in context.optimizers.values():
        watched.takes_norms = True
    retried = train_step(
        replace(
            context,
            autocast=off,
            scaler=plain,
            scale_rule=rule,
            observers=unobserved,
            graph=None,
        ),
        batches,
    )
    context.recipe.scaler = scaler
    norms = [norm for update in retried.updates.values() for norm in update.norms]
    return Retry(
        step=step,
        loss=retried.loss.item(),
        grad_norm=torch.linalg.vector_norm(torch.stack(norms)).item(),
        applied=not all_skipped(retried),
    )


def make_autocast(config: RunConfig, device: torch.device) -> torch.autocast:
    """Return the autocast of this precision; bf16 for fp8.

    Disabled in fp32, and if shards are cast when they are gathered.
    """
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    casts = config.precision != "fp32" and config.training.shard_casts == "autocast"
    return torch.autocast(device.type, dtype=dtype, enabled=casts)


def make_scaler(config: RunConfig, device: torch.device) -> GradScaler:
    """Return the scaler, enabled only in fp16: bf16 has the exponent range of fp32.

    The device is explicit: `GradScaler()` means cuda, and disables itself without one.
    """
    is_enabled = config.precision == "fp16" and config.scaler.enabled
    # Scale and growth tracker are created on the device with the first loss, and stay there.
    scaler = GradScaler(
        device.type,
        init_scale=config.scaler.init_scale,
        growth_factor=config.scaler.growth_factor,
        backoff_factor=config.scaler.backoff_factor,
        growth_interval=config.scaler.growth_interval,
        enabled=is_enabled,
    )
    if scaler.is_enabled() != is_enabled:
        raise RuntimeError(f"the loss scaler disabled itself on {device}; fp16 needs it")
    return scaler
