"""One step of mixed-precision training. Read it from top to bottom.

`train_step` attempts a step: forward under autocast, backward of the scaled loss, unscale, clip,
step or skip, update of the scale. trainer.loop calls it.

Shapes: B examples in a micro-batch, A micro-batches in a step, P parameters of an optimizer.
Counts: an *attempted* step is the step number; the scaler skips some; the others are *applied*.
In a step the host waits for the device only in an unfused optimizer and in an active replay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from halfstep.config_groups import Scaler, Training
from halfstep.recipe import Loss, Recipe, RecipeError
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Retry
from trainer.data.batches import Batches
from trainer.distributed.ranks import Ranks
from trainer.distributed.shards import check_one_loss
from trainer.observers import Observers
from trainer.optimizers import StepResult, Update, WatchedOptimizer
from trainer.precision.scale_policies import ScaleRule


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

    def passes(
        self,
        batches: Iterable[Any],
        forward: Callable[[], AbstractContextManager[Any]],
        ranks: Ranks,
    ) -> Iterator[tuple[int, tuple[Loss, ...]]]:
        """Run the forward passes of a step's micro-batches; see forward_passes."""
        return forward_passes(self.recipe, batches, self.training, forward, ranks)

    def parameters(self, loss: Loss) -> list[Tensor]:
        """Return the parameters that a loss trains, those of all its optimizers."""
        return [p for name in loss.optimizers for p in self.optimizers[name].parameters]


def train_step(context: StepContext, batches: Iterable[Any]) -> StepResult:
    """Attempt one step: forward, backward, unscale, clip, step or skip, update the scale.

    The host only queues work here; nothing waits for the device. (The one exception is an unfused
    optimizer under an enabled scaler: `GradScaler.step` then asks the device whether to skip.)
    batches: the micro-batches, taken one by one.
    Source: PyTorch's AMP examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """
    scaler, optimizers, training = context.scaler, context.optimizers, context.training
    # 1 × scale: reads the scale as a new device tensor; get_scale() would wait.
    scale = scaler.scale(context.scale_rule.one)
    loss_sum = torch.zeros_like(scale)  # stays on the device, and is read when its row arrives
    updates = {name: watched.idle for name, watched in optimizers.items()}
    stepped: set[str] = set()
    rounds = 0  # number of losses
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
            # While replay is active, the host waits here for the previous step, whose weights are
            # about to change; the device has this step's forward and backward queued meanwhile.
            context.observers.before_update()
        stepped.update(names)
        rounds += 1
        for name in names:
            updates[name] = update_weights(context, optimizers[name])

    if not stepped:
        raise RecipeError("training_step yields no loss")
    # Once, after all optimizers: it reduces the scale if any of them was skipped. Between two of
    # them it would unscale the second one's gradients by a scale that they were not multiplied by.
    found_inf = [update.found_inf for update in updates.values()]
    scale_after = context.scale_rule.update(scaler, scale, found_inf)
    loss = context.ranks.mean_(loss_sum)
    rate = next(iter(optimizers.values())).rate  # as it was applied
    return StepResult(loss, scale, scale_after, updates, stepped, rate, rounds)


def all_skipped(result: StepResult) -> bool:
    """Return whether every optimizer that took part was skipped. The host waits for the device."""
    return all(bool(result.updates[name].found_inf) for name in result.stepped)


def retry_in_fp32(
    context: StepContext, batches: Iterable[Any], step: int, device: torch.device
) -> Retry:
    """Attempt the same batches without autocast; return the event with the result.

    The weights are those of the skipped attempt. Dropout draws new masks, and BatchNorm counts the
    batch twice. A scaler of scale 1 still skips what is not finite in fp32 either.
    """
    plain = GradScaler(device.type, init_scale=1.0, growth_interval=2**31 - 1)
    off = torch.autocast(device.type, enabled=False)
    scaler, context.recipe.scaler = context.recipe.scaler, plain
    rule = ScaleRule(Scaler(), device)
    unobserved = Observers(_ignore, _ignore)
    retried = train_step(
        replace(context, autocast=off, scaler=plain, scale_rule=rule, observers=unobserved), batches
    )
    context.recipe.scaler = scaler
    norms = torch.stack([update.total_norm for update in retried.updates.values()])
    return Retry(
        step=step,
        loss=retried.loss.item(),
        grad_norm=torch.linalg.vector_norm(norms).item(),
        applied=not all_skipped(retried),
    )


def forward_passes(
    recipe: Recipe,
    batches: Iterable[Any],
    training: Training,
    forward: Callable[[], AbstractContextManager[Any]],
    ranks: Ranks,
) -> Iterator[tuple[int, tuple[Loss, ...]]]:
    """Run the forward passes; yield (index, losses), to be back-propagated at once.

    With one optimizer, one micro-batch after another, so that only one is in memory. With several
    they advance in lock-step, from one loss to the next: all have to add their gradients before the
    optimizer of that loss steps.  forward: creates the context of a forward pass.
    """
    count = training.accumulation_steps
    started = (recipe.training_step(batch) for batch in batches)
    is_alone = len(recipe.optimizers) == 1
    passes: Iterable[Any] = started if is_alone else list(started)
    while True:
        numbers: list[int] = []
        for index, one_pass in enumerate(passes):
            # With several devices, gradients are averaged only in the last backward pass.
            # (Averaging happens before unscaling, so an inf on one device is in every rank's
            # gradients, and all skip together.)
            with nullcontext() if index == count - 1 else ranks.local_gradients():
                # Autocast is for the forward pass and the loss. backward() runs each operation in
                # the dtype that autocast chose in the forward pass, and stays outside. Matrix
                # products run in fp16, sums and losses in fp32; the weights stay in fp32, and each
                # is cast once per pass: leaving the context drops the casts.
                with forward():
                    losses = as_losses(next(one_pass, ()))
                numbers.append(len(losses))
                if losses:
                    yield index, losses
                del losses  # and their graph
        if len(set(numbers)) > 1:
            raise RecipeError(
                f"training_step yields {numbers} losses in the micro-batches of one "
                "step; yield the same number in each"
            )
        if numbers[0] == 0:
            return
        if is_alone:
            with forward():  # the optimizer has stepped: run the code after the yield, once
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
        # Again: another optimizer's loss may have left gradients here since.
        context.optimizers[name].drop_gradients()
    for number, loss in enumerate(losses, 1):
        # The mean over micro-batches, times the scale, so that small gradients do not underflow to
        # 0 in fp16, whose smallest positive number is 2^-24.
        mean_loss = loss.value / context.training.accumulation_steps
        # Of losses yielded together, each reaches only the parameters of its own optimizers.
        is_for_all = len(loss.optimizers) == len(names)
        own = None if is_for_all else context.parameters(loss)
        is_last = number == len(losses)
        scaled = context.scaler.scale(mean_loss)
        scaled.backward(inputs=own, retain_graph=not is_last)  # type: ignore[no-untyped-call]
        loss_sum += mean_loss.detach()
    return names


def update_weights(context: StepContext, watched: WatchedOptimizer) -> Update:
    """Unscale, clip, and step or skip; return the scaler's decision as device tensors."""
    training, scaler = context.training, context.scaler
    # Unscale first: a clip of scaled gradients would reduce them by the scale, e.g. 65,536 times
    # too much. inf and NaN are detected in the same pass, and stay on the device.
    scaler.unscale_(watched.optimizer)
    # Norms before the clip, because afterwards one NaN has spread to all gradients. The norm of
    # (P,) norms equals the norm over all elements, in one pass.
    norms = watched.gradient_norms()  # (P,)
    total_norm = clipped_norm = torch.linalg.vector_norm(norms)  # 0-dim
    counts = watched.count_nonfinite(norms) if scaler.is_enabled() else None
    context.observers.unscaled(watched)

    if training.max_grad_norm is not None:
        # clip_grad_norm_ in two parts, to avoid computing the norms twice.
        torch.nn.utils.clip_grads_with_norm_(watched.parameters, training.max_grad_norm, total_norm)
    if training.max_grad_value is not None:
        # After the clip by norm: smaller elements cannot exceed that bound.
        watched.check_elements_can_be_clipped()
        torch.nn.utils.clip_grad_value_(watched.parameters, training.max_grad_value)
        clipped_norm = torch.linalg.vector_norm(watched.gradient_norms())

    # A fused optimizer gets found_inf as a tensor, and leaves the weights unchanged if it is 1; an
    # unfused one is not called at all. Either way its moments are unchanged.
    found_inf = watched.step(scaler)
    return Update(found_inf, total_norm, clipped_norm, norms, counts)


def make_autocast(config: RunConfig[Any], device: torch.device) -> torch.autocast:
    """Return the autocast of this precision; bf16 for fp8.

    Disabled in fp32, and if shards are cast when they are gathered.
    """
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    casts = config.precision != "fp32" and config.training.shard_casts == "autocast"
    return torch.autocast(device.type, dtype=dtype, enabled=casts)


def make_scaler(config: RunConfig[Any], device: torch.device) -> GradScaler:
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


def as_losses(yielded: Loss | tuple[Loss, ...]) -> tuple[Loss, ...]:
    """Return what training_step yielded at once as a tuple."""
    return (yielded,) if isinstance(yielded, Loss) else tuple(yielded)


def check_losses(losses: tuple[Loss, ...], optimizers: Mapping[str, WatchedOptimizer]) -> None:
    """Raise RecipeError for a loss that cannot be minimized. Uses only host data."""
    for loss in losses:
        for name in loss.optimizers:
            if name not in optimizers:
                known = ", ".join(optimizers)
                raise RecipeError(f'a loss names optimizer "{name}"; allowed: {known}')
        if loss.value.dim() != 0:
            # An fp16 tensor with dimensions stays fp16 when scaled, and 65,536 is beyond its range.
            shape = tuple(loss.value.shape)
            names = '", "'.join(loss.optimizers)
            raise RecipeError(
                f'the loss of "{names}" has shape {shape}: yield a scalar, such as its mean'
            )
    if any(watched.shared_with for watched in optimizers.values()):
        check_one_loss([loss.optimizers for loss in losses], optimizers)


def _ignore(_: object) -> None: ...
