"""The training loop, and mixed precision as it should be done. Read it from top to bottom.

    python -m trainer.train digits --precision fp16 --set training.steps=100
    python -m trainer.train --help

It runs by itself: no server, no database. What it measures goes to two callbacks, `on_steps` and
`on_event`; what the outside wants comes from one, `control`, asked between steps.

Shapes: B examples in a micro-batch, A micro-batches in a step, P parameters of an optimizer.
Counts: an *attempted* step is the step number, and what the learning-rate schedule counts; the
scaler skips some; the others are *applied*. (With a fused optimizer only the device knows which, so
a schedule that counted applied steps would make the host wait for the device in every step.)
"""

import math
import os
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.deterministic
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from trainer import artifacts, checkpoint
from trainer.checkpoint import Progress
from trainer.config import ConfigError, RunConfig, Training
from trainer.ranks import Ranks, Request
from trainer.recipe import Loss, Recipe, RecipeError
from trainer.sampler import Sampler, check_batch
from trainer.spool import Event, Steps
from trainer.telemetry import Telemetry, WatchedOptimizer, watch


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
    control: Callable[[], Request] = Request,
    checkpoint_folder: Path | None = None,
    resume: Path | None = None,
    started_at: float | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train until the last step or until told to stop, which leaves a checkpoint as well.

    started_at: epoch seconds of the run's first start.  checkpoint_folder: None saves nothing.
    Raises ConfigError, RecipeError or CheckpointError for what the user can put right.
    """
    ranks = ranks or Ranks()
    started_at = started_at or time.time()
    training = config.training
    if ranks.rank > 0:  # one process writes the run's history
        on_steps, on_event = _ignore, _ignore

    # ---- Setup: the same bits each time -------------------------------------------------------
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the device is cuda, but this machine has no usable CUDA device")
    torch.set_num_threads(training.threads)  # sums over threads differ in their last bits
    make_deterministic(training.deterministic)
    seed_everything(training.seed)

    recipe = recipe_class(config, device)  # draws the initial weights
    check_batch(training, recipe.train_size, recipe.name, ranks.world_size)
    seed_everything(training.seed + ranks.rank)  # each rank has its own dropout from here on

    # DistributedDataParallel replaces the modules that the recipe calls; these are the plain ones.
    modules = dict(recipe.modules)
    recipe.modules = {name: ranks.wrap(module) for name, module in modules.items()}
    optimizers = watch(modules, recipe.optimizers)
    peak_lrs = [group["lr"] for group in parameter_groups(recipe)]
    sampler = Sampler(
        recipe.train_size,
        training,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin=device.type == "cuda",
    )

    # ---- Mixed precision: two objects, two switches -------------------------------------------
    # With both off the same loop is plain fp32 (not TF32, unless the recipe asks for it).
    autocast = make_autocast(config, device)
    recipe.scaler = scaler = make_scaler(config, device)
    telemetry = Telemetry(optimizers, device, training.max_grad_norm, on_steps, on_event)

    progress = Progress()
    if resume is not None:
        state = checkpoint.load(resume)
        progress, notes = checkpoint.restore(
            state, recipe, modules, config, device, ranks.rank, ranks.world_size
        )
        on_event({"event": "resumed", "step": progress.step, "exact": not notes, "notes": notes})
    step, sampler.position, telemetry.skipped = progress.step, progress.position, progress.skipped

    groups = parameter_groups(recipe)  # only now: loading an optimizer's state replaces its groups

    # What happens between steps -----------------------------------------------------------------
    def elapsed_ms() -> int:
        return int((time.time() - started_at) * 1000)

    def report(metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            event = {"event": "metric", "step": step, "name": name, "value": value}
            on_event(event | {"elapsed_ms": elapsed_ms()})

    def save_artifacts(found: Mapping[str, bytes | str]) -> None:
        if checkpoint_folder is not None and ranks.rank == 0:
            folder = checkpoint_folder.parent / "artifacts"
            for event in artifacts.save_artifacts(folder, step, found):
                on_event(event)

    def save(reason: str, request: int | None) -> None:
        telemetry.drain()  # the host waits for the device; so does reading the weights
        random_states = ranks.gather(checkpoint.random_state(device))
        if checkpoint_folder is None or ranks.rank > 0:
            return
        at = Progress(step, telemetry.skipped, sampler.position)
        state = checkpoint.capture(recipe, modules, config, at, device, random_states)
        files = [
            {
                "kind": "weights" if saved.path.suffix == ".safetensors" else "checkpoint",
                "path": f"{checkpoint_folder.name}/{saved.path.name}",
                "size_bytes": saved.size_bytes,
                "sha256": saved.sha256,
            }
            for saved in checkpoint.save(checkpoint_folder, state, modules)
        ]
        event = {"event": "checkpoint", "step": step, "reason": reason, "request": request}
        on_event(event | {"files": files})

    # ---- The loop -----------------------------------------------------------------------------
    stopwatch = Stopwatch(device)
    stop = None
    set_training_mode(recipe, True)
    with telemetry:  # hands over what is left in its ring, even if a step raises
        while step < training.steps and stop is None:
            step += 1
            step_started = time.perf_counter()

            # A Python number, which the fused kernel takes as an argument: no copy.
            factor = learning_rate_factor(training, step)
            for group, peak_lr in zip(groups, peak_lrs, strict=True):
                group["lr"] = peak_lr * factor

            batches = [recipe.batch(indices, generator) for indices, generator in sampler.step()]
            train_step(
                recipe,
                batches,
                autocast=autocast,
                scaler=scaler,
                optimizers=optimizers,
                max_grad_norm=training.max_grad_norm,
                telemetry=telemetry,
                ranks=ranks,
            )
            # On CUDA the host runs ahead of the device until the launch queue is full: a single
            # time is how long queueing took, and the mean of many is the device's own pace.
            step_us = int((time.perf_counter() - step_started) * 1e6)
            telemetry.tick(step, elapsed_ms(), step_us, lr=groups[0]["lr"])

            is_last = step == training.steps
            if is_last or _is_due(config.evaluation.every_steps, step):
                telemetry.drain()  # evaluating waits for the device anyway
                metrics, found = evaluate(recipe, autocast)
                report(metrics)
                save_artifacts(found)

            request = ranks.agree(control())
            stop = None if is_last else request.stop
            if is_last or stop:
                save(stop or "end", request.checkpoint)
            elif request.checkpoint is not None:
                save("request", request.checkpoint)
            elif _is_due(config.checkpoints.every_steps, step):
                save("interval", None)

    report(stopwatch.metrics())
    return Outcome(STATUS_OF_STOP[stop], step)


def train_step(
    recipe: Recipe,
    batches: Sequence[Any],
    *,
    autocast: torch.autocast,
    scaler: GradScaler,
    optimizers: Mapping[str, WatchedOptimizer],
    max_grad_norm: float | None,
    telemetry: Telemetry,
    ranks: Ranks,
) -> None:
    """Attempt one step: forward, backward, unscale, clip, step or skip, update the scale.

    The host only queues work here; nothing waits for the device. (The one exception is an unfused
    optimizer under an enabled scaler: `GradScaler.step` then asks the device whether to skip.)
    Source: PyTorch's AMP examples, https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """
    scale_before = telemetry.read_scale(scaler)
    loss_sum = torch.zeros_like(scale_before)
    results = {name: watched.idle_result for name, watched in optimizers.items()}
    stepped = set()

    # One generator a micro-batch. They advance in lock-step, from one loss to the next, so that
    # all micro-batches have added their gradients before the optimizer of that loss steps.
    passes = [recipe.training_step(batch) for batch in batches]
    while name := backward_next_loss(recipe, passes, autocast, scaler, optimizers, loss_sum, ranks):
        if name in stepped:
            raise RecipeError(f'training_step yields two losses for optimizer "{name}": add them')
        stepped.add(name)
        watched = optimizers[name]

        # Unscale first: a clip of scaled gradients would cut them by the scale, some 65,536 times
        # too much. inf and NaN are found in the same pass, and kept on the device.
        scaler.unscale_(watched.optimizer)
        # Norms before the clip, for afterwards a NaN in one gradient is a NaN in all of them.
        norms = watched.gradient_norms()  # (P,)
        total_norm = torch.linalg.vector_norm(norms)  # 0-dim, unscaled
        if max_grad_norm is not None:
            # clip_grad_norm_ in two halves: it would take the same norms again.
            torch.nn.utils.clip_grads_with_norm_(watched.parameters, max_grad_norm, total_norm)
        found_inf = watched.step(scaler)
        results[name] = (found_inf, total_norm, norms)

    if not stepped:
        raise RecipeError("training_step yields no loss")
    # Once, after all optimizers: it halves the scale if any of them was skipped.
    scaler.update()

    found_infs, total_norms, norms_of_each = zip(*results.values(), strict=True)
    telemetry.write(
        ranks.mean_(loss_sum),
        scale_before,
        telemetry.read_scale(scaler),
        found_infs,
        total_norms,
        norms_of_each,
    )


def backward_next_loss(
    recipe: Recipe,
    passes: Sequence[Any],
    autocast: torch.autocast,
    scaler: GradScaler,
    optimizers: Mapping[str, WatchedOptimizer],
    loss_sum: Tensor,
    ranks: Ranks,
) -> str | None:
    """Advance every micro-batch to its next loss and back-propagate it; add it to loss_sum.

    Return the name of the optimizer whose gradients are now complete, None after the last loss.
    """
    names: list[str | None] = []
    for index, one_pass in enumerate(passes):
        is_last = index == len(passes) - 1
        # With several devices, gradients are averaged over them in the last backward only.
        with nullcontext() if is_last else ranks.local_gradients(recipe.modules):
            # Autocast is for the forward pass and the loss. backward() runs each operation in the
            # type that autocast chose for it going forward, and stays outside.
            with autocast:
                loss: Loss | None = next(one_pass, None)
            names.append(loss.optimizer if loss else None)
            if loss is None:
                continue
            check_loss(loss, optimizers)
            if index == 0:
                # Here and not after the step: another optimizer's loss may have left gradients.
                optimizers[loss.optimizer].optimizer.zero_grad(set_to_none=True)
            # The mean over micro-batches. Times the scale, so that small gradients do not
            # underflow to 0 in fp16, whose smallest positive number is 2^-24.
            mean_loss = loss.value / len(passes)
            scaler.scale(mean_loss).backward()  # type: ignore[no-untyped-call]
            loss_sum += mean_loss.detach()
    if len(set(names)) > 1:
        raise RecipeError(
            f"training_step must yield the same optimizers for every micro-batch, not {names}"
        )
    return names[0]


@torch.no_grad()
def evaluate(
    recipe: Recipe, autocast: torch.autocast
) -> tuple[dict[str, float], dict[str, bytes | str]]:
    """Return the recipe's metrics and artifacts. The host waits for the device, once in a while."""
    set_training_mode(recipe, False)
    with autocast:
        metrics, found = recipe.evaluate(), recipe.artifacts()
    set_training_mode(recipe, True)
    return metrics, found


def make_autocast(config: RunConfig[Any], device: torch.device) -> torch.autocast:
    """Return the autocast of this precision; in fp32 one that is switched off."""
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=config.precision != "fp32")


def make_scaler(config: RunConfig[Any], device: torch.device) -> GradScaler:
    """Return the scaler, enabled in fp16 only: bf16 has the exponents of fp32.

    The device is always named: `GradScaler()` means cuda, and disables itself where there is none.
    """
    wanted = config.precision == "fp16" and config.scaler.enabled
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


def learning_rate_factor(training: Training, step: int) -> float:
    """Return what the peak learning rate is multiplied by at this attempted step, from 1."""
    if step <= training.warmup_steps:
        return step / training.warmup_steps
    if training.schedule == "constant":
        return 1.0
    done = (step - training.warmup_steps) / (training.steps - training.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def check_loss(loss: Loss, optimizers: Mapping[str, WatchedOptimizer]) -> None:
    """Raise RecipeError for a loss that cannot be minimised. Asks the host only."""
    if loss.optimizer not in optimizers:
        known = ", ".join(optimizers)
        raise RecipeError(f'a loss names the optimizer "{loss.optimizer}"; there are {known}')
    if loss.value.dim() != 0:
        # An fp16 tensor with dimensions stays fp16 when scaled, and 65,536 is beyond its range.
        shape = tuple(loss.value.shape)
        raise RecipeError(f'the loss of "{loss.optimizer}" has shape {shape}: yield its mean')


def make_deterministic(wanted: bool) -> None:
    """Choose algorithms that repeat themselves bit for bit, or the fastest ones."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = not wanted
    # Filling every new tensor with NaN finds bugs, and costs a kernel a tensor: not here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def parameter_groups(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers, in order; each has its own "lr"."""
    return [group for each in recipe.optimizers.values() for group in each.param_groups]


def seed_everything(seed: int) -> None:
    """Seed every global generator that a recipe may draw from, on host and device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_training_mode(recipe: Recipe, training: bool) -> None:
    """Switch dropout and batch statistics on or off."""
    for module in recipe.modules.values():
        module.train(training)


class Stopwatch:
    """Total time and peak memory, measured as PyTorch's AMP recipe measures them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
        self._started = time.perf_counter()

    def metrics(self) -> dict[str, float]:
        """Return seconds since the start, and peak bytes: of tensors; on a CPU, of the process."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: KiB
        return {
            "run/seconds": time.perf_counter() - self._started,
            "run/peak_memory_bytes": float(peak),
        }


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


def _ignore(_: object) -> None: ...


if __name__ == "__main__":
    from trainer.console import main

    main()
