"""Steps of several optimizers, each with losses of its own, as in a GAN.

Imported by trainer.step, which has the parts that a step of one optimizer shares.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.config_groups import Training
from halfstep.recipe import Loss, Recipe, RecipeError
from trainer.distributed.ranks import Ranks
from trainer.distributed.shards import check_one_loss
from trainer.optimizers import StepResult, Update, WatchedOptimizer

if TYPE_CHECKING:
    from trainer.step import StepContext


def train_step(
    context: "StepContext",
    batches: Iterable[object],
    update_weights: Callable[["StepContext", WatchedOptimizer], Update],
) -> StepResult:
    """Attempt a step of all optimizers, without the update of the scale. batches: micro-batches.

    The scale is updated once, after all optimizers, and reduced if any of them was skipped. Between
    two of them an update would unscale the second one's gradients by a scale that they were not
    multiplied by.
    """
    optimizers, training = context.optimizers, context.training
    values: list[Tensor] = []  # of the losses
    updates = {name: watched.idle for name, watched in optimizers.items()}
    stepped: set[str] = set()
    rounds = 0  # number of losses
    for watched in optimizers.values():
        watched.drop_gradients()  # before the forward pass, which can use their memory

    for index, losses in context.passes(batches, lambda: context.autocast, context.ranks):
        names = tuple(dict.fromkeys(name for loss in losses for name in loss.optimizers))
        for name in names if index == 0 else ():
            if name in optimizers:
                # Again: another optimizer's loss may have left gradients here since.
                optimizers[name].drop_gradients()
        values.append(backward(context, losses))
        if index < training.accumulation_steps - 1:
            continue  # gradients add up until the last micro-batch
        if again := stepped.intersection(names):
            raise _two_losses(min(again))
        if not stepped:
            context.observers.before_update()
        stepped.update(names)
        rounds += 1
        for name in names:
            updates[name] = update_weights(context, optimizers[name])

    if not stepped:
        raise RecipeError("training_step yields no loss")
    rate = next(iter(optimizers.values())).rate  # as it was applied
    scale = context.scale_rule.scale(context.scaler)
    return StepResult(step_loss(context.ranks, values), scale, updates, stepped, rate, rounds)


def forward_passes(
    recipe: Recipe,
    batches: Iterable[object],
    training: Training,
    forward: Callable[[], AbstractContextManager[object]],
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
            with nullcontext() if index == count - 1 else ranks.local_gradients():
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
            [name] = recipe.optimizers
            finish(name, one_pass, forward())
            return


def step_loss(ranks: Ranks, values: list[Tensor]) -> Tensor:
    """Return a step's loss, 0-dim: the sum of the values of its losses, averaged over ranks.

    It stays on the device, and is read when its row arrives.
    """
    loss = values[0] if len(values) == 1 else reduce(torch.add, values)
    return loss if ranks.world_size == 1 else ranks.mean_(loss.clone())


def finish(name: str, one_pass: Iterator[Any], forward: AbstractContextManager[object]) -> None:
    """Run the code of training_step after its loss, once; raise RecipeError for a second loss.

    name: of the only optimizer, which has stepped.
    """
    with forward:
        if next(one_pass, None) is not None:
            raise _two_losses(name)


def backward(context: "StepContext", losses: tuple[Loss, ...]) -> Tensor:
    """Back-propagate the losses of one micro-batch; return their sum, 0-dim, without a graph.

    With A micro-batches it is a share of 1/A of the step's loss.
    """
    check_losses(losses, context.optimizers)
    names = {name for loss in losses for name in loss.optimizers}
    count = context.training.accumulation_steps
    values: list[Tensor] = []
    for number, loss in enumerate(losses, 1):
        # The mean over micro-batches, times the scale, so that small gradients do not underflow to
        # 0 in fp16, whose smallest positive number is 2^-24.
        mean_loss = loss.value if count == 1 else loss.value / count
        # Of losses yielded together, each reaches only the parameters of its own optimizers.
        is_for_all = len(loss.optimizers) == len(names)
        own = None if is_for_all else context.parameters(loss)
        is_last = number == len(losses)
        scaled = context.scaler.scale(mean_loss)
        scaled.backward(inputs=own, retain_graph=not is_last)  # type: ignore[no-untyped-call]
        values.append(mean_loss.detach())
    return values[0] if len(values) == 1 else reduce(torch.add, values)


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


def _two_losses(name: str) -> RecipeError:
    return RecipeError(f'training_step yields two losses for optimizer "{name}": add them')
