"""Set-up before the first step: process, recipe, modules, and the observers of steps."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.clock import clock
from halfstep.config_groups import Training
from halfstep.recipe import Recipe, RecipeError
from halfstep.run_config import ConfigError, RunConfig
from halfstep.telemetry.events import Event, LeftOut, Length, Resumed
from halfstep.telemetry.spool import Steps
from trainer.checkpoints.checkpoint import Progress
from trainer.checkpoints.checkpointing import Saver
from trainer.checkpoints.initial_weights import start_from_weights
from trainer.checkpoints.resume import load_parts, resume_from
from trainer.checkpoints.rollback import Rollback
from trainer.cuda_graph import NAME as CUDA_GRAPH
from trainer.cuda_graph import GraphedSteps, find_obstacle
from trainer.data.batches import Batches
from trainer.data.datasets import check_data
from trainer.data.sampler import UNKNOWN_SIZE, Sampler, check_batch
from trainer.data.sources import make_sources
from trainer.diagnosis import shapes
from trainer.diagnosis.fp8_ranges import Fp8Ranges
from trainer.diagnosis.headroom import Headroom
from trainer.diagnosis.histogram import Histogram
from trainer.diagnosis.lost_updates import Updates
from trainer.diagnosis.missing_gradients import MissingGradients
from trainer.diagnosis.nonfinite_buffers import NonfiniteBuffers
from trainer.diagnosis.precision_diff import PrecisionDiffs
from trainer.diagnosis.replay import Replay
from trainer.diagnosis.spikes import Spikes
from trainer.diagnosis.unused_modules import UnusedModules
from trainer.distributed.averaging import AveragingCheck
from trainer.distributed.ranks import Ranks
from trainer.ema import Ema
from trainer.logged_values import Logged
from trainer.observers import Observers, best_effort
from trainer.optimizers import prepare_momentum, watch_optimizers
from trainer.precision.activation_checkpoints import set_checkpoints
from trainer.precision.bf16_weights import set_bf16_weights
from trainer.precision.buffers import BufferRule
from trainer.precision.memory_format import set_channels_last
from trainer.precision.module_precision import set_precisions
from trainer.precision.scale_policies import ScaleRule, StopRule
from trainer.precision.torchao import load_torchao
from trainer.prepared_recipe import PreparedRecipe
from trainer.repeatability import choose_fp32, make_deterministic, seed_everything
from trainer.schedule import Schedule, make_schedule, peak_rates
from trainer.step import StepContext, make_autocast, make_scaler
from trainer.telemetry import Telemetry
from trainer.workload import workload


@dataclass(frozen=True)
class StepObservers:
    """The observers of every step, by name."""

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
    precision_diffs: PrecisionDiffs


@dataclass
class Run:
    """Everything that the loop uses, ready for the first step."""

    context: StepContext
    step_observers: StepObservers
    prepared: PreparedRecipe
    peaks: Any  # learning rates of the optimizers' groups, see trainer.schedule
    parts: dict[str, Any]  # of a checkpoint, by name: each has a state_dict
    schedule: Schedule
    ema: Ema | None
    buffer_rule: BufferRule
    saver: Saver
    rollback: Rollback
    progress: Progress  # of the checkpoint that the run resumes from
    on_event: Callable[[Event], None]

    @property
    def config(self) -> RunConfig:
        """The configuration, with the number of steps."""
        return self.prepared.config


def prepare_run(
    recipe_class: type[Recipe],
    config: RunConfig,
    *,
    device: torch.device,
    on_steps: Callable[[Steps], None],
    on_event: Callable[[Event], None],
    checkpoint_folder: Path | None = None,
    artifact_folder: Path | None = None,
    resume: Path | None = None,
    weights: Mapping[str, Path] | None = None,
    started_at: float | None = None,
    ranks: Ranks | None = None,
    is_checked: bool = False,
) -> Run:
    """Set up a run, for trainer.loop.train.

    on_steps, on_event: called one at a time, by this thread and the writer thread.
    checkpoint_folder: None: save nothing.  artifact_folder: by default `artifacts` in
    checkpoint_folder.
    weights: initial weights if there is no checkpoint to resume, see load_weights; None: those of
    weights.path.
    started_at: first start of the run, by halfstep.clock.
    is_checked: the checksum of `resume` is already verified.
    Raises ConfigError, RecipeError, CheckpointError or WeightsError for errors of the user.
    """
    ranks = ranks or Ranks()
    started_at = clock() if started_at is None else started_at
    on_steps, on_event = one_at_a_time(on_steps, on_event)
    training = config.training
    if ranks.rank > 0:  # one process writes the run's history
        on_steps, on_event = (lambda _: None), (lambda _: None)

    # ---- Determinism ----------------------------------------------------------------------------
    device = set_up_process(device, training)
    recipe = make_recipe(recipe_class, config, device)  # draws the initial weights
    check_batch(training, recipe.train_size, recipe.name, ranks.world_size)
    if training.epochs is not None:
        config = with_steps_of_epochs(config, recipe.train_size, ranks.world_size)
        training = config.training
        on_event(Length(step=0, steps=training.steps))
    seed_everything(training.seed + ranks.rank)  # from here on each rank has its own dropout

    # DistributedDataParallel replaces the modules that the recipe calls; these are the plain ones.
    # (With training.parallel fsdp they stay, with sharded weights.)
    modules = dict(recipe.modules)
    if resume is None:
        start_from_weights(weights, modules, config, on_event)
    transform(modules, recipe.optimizers, config, device)
    recipe.modules = ranks.wrap(modules, recipe.optimizers, config, device)
    if training.compile:  # outermost, so that the compiler can overlap DDP's communication
        recipe.modules = {name: compile_module(m, training) for name, m in recipe.modules.items()}
    peaks = peak_rates(recipe.optimizers)

    # ---- Mixed precision, and the observers of each step ----------------------------------------
    if training.cuda_graph and (obstacle := find_obstacle(recipe, config, device, ranks)):
        on_event(LeftOut(step=0, diagnosis=CUDA_GRAPH, reason=obstacle))
        training = training.model_copy(update={"cuda_graph": False})
        config = config.model_copy(update={"training": training})
    prepared = PreparedRecipe(recipe, modules, config, device, ranks)
    context, step_observers = make_context(
        prepared, on_steps=on_steps, on_event=on_event, at=started_at
    )

    # ---- Resume ---------------------------------------------------------------------------------
    progress = Progress()
    inherited: Mapping[str, Any] = {}
    if resume is not None:
        # Rank 0 decides: the other ranks' folders are on other machines.
        is_fork = ranks.gather(checkpoint_folder not in (None, resume.parent))[0]
        progress, inherited, notes = resume_from(
            resume, prepared, context.batches, is_fork=is_fork, is_checked=is_checked
        )
        on_event(Resumed(step=progress.step, exact=not notes, notes=notes))

    # Only now: loading an optimizer's state replaces its groups.
    schedule = make_schedule(training, recipe.optimizers, peaks, device)

    step_observers.telemetry.skipped = progress.skipped
    with best_effort("count of the workload", 0, on_event):
        on_event(workload(recipe, config, device, ranks.world_size))
    with best_effort("check of the shapes", 0, on_event):
        if misfits := shapes.misfits(modules, config):
            on_event(misfits)

    # These counters continue after a resume; only the scale rule affects the next step.
    parts: dict[str, Any] = {
        "scale_rule": context.scale_rule,
        "schedule": schedule,
        **context.observers.members,
    }
    ema = Ema(training.ema_decay, modules, context.optimizers) if training.ema_decay else None
    if ema is not None:
        parts["ema"] = ema
    load_parts(parts, inherited)
    del inherited  # its last reference: frees the checkpoint before the first step
    is_restored = config.scaler.restore_buffers and context.scaler.is_enabled()
    buffer_rule = BufferRule(modules, is_on=is_restored)
    saver = Saver(checkpoint_folder, prepared, context.batches, parts, on_event, artifact_folder)
    step_observers.logged.save = saver.save_artifacts
    rollback = Rollback(config, step_observers.spikes, checkpoint_folder, ranks)
    return Run(
        context,
        step_observers,
        prepared,
        peaks,
        parts,
        schedule,
        ema,
        buffer_rule,
        saver,
        rollback,
        progress,
        on_event,
    )


def make_context(
    prepared: PreparedRecipe,
    *,
    on_steps: Callable[[Steps], None],
    on_event: Callable[[Event], None],
    at: float,
) -> tuple[StepContext, StepObservers]:
    """Create the context of all steps, and its observers. at: started_at of `prepare_run`."""
    recipe, modules, ranks = prepared.recipe, prepared.modules, prepared.ranks
    config, device = prepared.config, prepared.device
    training, diagnosis = config.training, config.diagnosis
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    sampler = Sampler(recipe.train_size, training, **place, pin=device.type == "cuda")
    batches = Batches(sampler, *make_sources(recipe, sampler, config, device, report_wait))
    observers = Observers(on_steps, on_event)

    # Mixed precision consists of two objects with a switch each. With both off the loop is plain
    # fp32, or TF32 if training.tf32 is on.
    autocast = make_autocast(config, device)
    recipe.scaler = scaler = make_scaler(config, device)
    rule = ScaleRule(config.scaler, device)
    is_scaled = scaler.is_enabled()
    optimizers = watch_optimizers(modules, recipe.optimizers, is_scaled=is_scaled)
    if is_scaled:
        prepare_momentum(recipe.optimizers)

    spikes = Spikes(config.spike, on_event)
    headroom = Headroom(modules, config, on_event)
    fp8_ranges = Fp8Ranges(modules, config, on_event)
    telemetry = Telemetry(optimizers, device, training, diagnosis, observers.receive, on_event, at)
    logged = Logged(device, telemetry.elapsed_ms, on_event)
    recipe.on_log = logged.log
    graph = GraphedSteps(logged, on_event) if training.cuda_graph else None
    context = StepContext(
        recipe, batches, autocast, scaler, rule, optimizers, training, ranks, observers, graph
    )

    @contextmanager
    def suspend() -> Iterator[None]:
        with headroom.suspend(), fp8_ranges.suspend(), logged.suspend():
            yield

    step_observers = StepObservers(
        StopRule(config.scaler),
        Replay(context, modules, config, device, on_event, spikes.left_out, suspend),
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
        PrecisionDiffs(context, modules, config, device, on_event, suspend),
    )
    if training.static_graph and ranks.world_size > 1:
        observers.join(averaging=AveragingCheck(ranks))
    observers.join(**vars(step_observers))
    return context, step_observers


def set_up_process(device: torch.device, training: Training) -> torch.device:
    """Make this process deterministic; return the device with its index.

    Raises ConfigError if the device does not exist.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the device is cuda, but this machine has no usable CUDA device")
    if device.type == "cuda":  # events and streams are created on the current device
        device = torch.device("cuda", device.index or 0)  # set_device requires an index
        torch.cuda.set_device(device)
    torch.set_num_threads(training.threads)  # sums over threads differ in their last bits
    make_deterministic(training.deterministic, device)
    choose_fp32(tf32=training.tf32)
    seed_everything(training.seed)
    return device


def make_recipe(recipe_class: type[Recipe], config: RunConfig, device: torch.device) -> Recipe:
    """Create the recipe. Raises RecipeError for an optimizer without a fused implementation."""
    try:
        recipe = recipe_class(config, device)
    except TypeError as error:
        if "unexpected keyword argument 'fused'" not in str(error):
            raise
        raise RecipeError(
            f"{error}: this optimizer has no fused form; leave out fused=config.training.fused"
        ) from error
    check_data(recipe)
    return recipe


def with_steps_of_epochs(config: RunConfig, train_size: int, world_size: int) -> RunConfig:
    """Return the configuration with the number of steps of its epochs; the last is complete."""
    training = config.training
    if train_size == UNKNOWN_SIZE:
        raise ConfigError(
            f"training.epochs is {training.epochs}, but the dataset is a stream without a length: "
            "set training.steps"
        )
    in_a_step = training.batch_size * training.accumulation_steps * world_size
    steps = max(1, math.ceil((training.epochs or 0) * train_size / in_a_step))
    # Validated again: e.g. a warm-up has to end before the last step.
    values = training.model_dump() | {"steps": steps}
    return config.model_copy(update={"training": type(training)(**values)})


def transform(
    modules: dict[str, nn.Module],
    optimizers: dict[str, Optimizer],
    config: RunConfig,
    device: torch.device,
) -> None:
    """Apply the configured precisions, activation checkpoints and memory format to the modules."""
    training = config.training
    if config.precision == "fp8":  # first: wrappers of forward call the forward that they find
        load_torchao("precision fp8")
        from trainer.precision.fp8 import set_fp8

        set_fp8(modules, config, device)
    set_precisions(modules, config, device)  # innermost, so that all callers use it
    set_checkpoints(modules, config)
    if training.channels_last:
        set_channels_last(modules, optimizers)
    if training.weights == "bf16" and config.precision == "bf16":
        set_bf16_weights(modules, optimizers)
        if training.rounding == "stochastic":
            load_torchao("training.rounding stochastic")
            from trainer.precision.stochastic_rounding import set_stochastic_rounding

            set_stochastic_rounding(optimizers, training)


def compile_module(module: nn.Module, training: Training) -> Any:
    """Return a compiled module; compile modes other than the default use CUDA graphs."""
    if training.compile_mode == "default":
        return torch.compile(module)
    return torch.compile(module, mode=training.compile_mode)


def one_at_a_time(
    on_steps: Callable[[Steps], None], on_event: Callable[[Event], None]
) -> tuple[Callable[[Steps], None], Callable[[Event], None]]:
    """Return both callbacks serialised by a lock: the writer thread emits events too."""
    turn = Lock()

    def in_turn(call: Callable[[Any], None], argument: Any) -> None:
        with turn:
            call(argument)

    return partial(in_turn, on_steps), partial(in_turn, on_event)


def report_wait(sentence: str) -> None:
    """Write to the run's log that training waits for data, with its workers' stacks."""
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
