"""What is made ready before a run's first step: the process, the recipe, and its modules."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.config_groups import Training
from halfstep.recipe import Recipe, RecipeError
from halfstep.run_config import ConfigError, RunConfig
from trainer.data.datasets import check_data
from trainer.data.sampler import UNKNOWN_SIZE
from trainer.precision.activation_checkpoints import set_checkpoints
from trainer.precision.bf16_weights import set_bf16_weights
from trainer.precision.memory_format import set_channels_last
from trainer.precision.module_precision import set_precisions
from trainer.precision.torchao import load_torchao
from trainer.repeatability import choose_fp32, make_deterministic, seed_everything


def set_up_process(device: torch.device, training: Training) -> torch.device:
    """Have this process reckon the same bits each time; return the device, by its number.

    Raises ConfigError if there is none.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the device is cuda, but this machine has no usable CUDA device")
    if device.type == "cuda":  # events and streams are made on the current one
        device = torch.device("cuda", device.index or 0)  # set_device refuses one without a number
        torch.cuda.set_device(device)
    torch.set_num_threads(training.threads)  # sums over threads differ in their last bits
    make_deterministic(training.deterministic)
    choose_fp32(tf32=training.tf32)
    seed_everything(training.seed)
    return device


def make_recipe(recipe_class: type[Recipe], config: RunConfig[Any], device: torch.device) -> Recipe:
    """Make the recipe. Raises RecipeError for an optimizer that has no fused form."""
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


def with_steps_of_epochs(
    config: RunConfig[Any], train_size: int, world_size: int
) -> RunConfig[Any]:
    """Return the configuration with as many steps as its epochs come to, the last one whole."""
    training = config.training
    if train_size == UNKNOWN_SIZE:
        raise ConfigError(
            f"training.epochs is {training.epochs}, but the dataset is a stream without a length: "
            "set training.steps"
        )
    in_a_step = training.batch_size * training.accumulation_steps * world_size
    steps = max(1, math.ceil((training.epochs or 0) * train_size / in_a_step))
    # Validated anew: a warm-up, for one, has to end before the last step.
    values = training.model_dump() | {"steps": steps}
    return config.model_copy(update={"training": type(training)(**values)})


def transform(
    modules: dict[str, nn.Module],
    optimizers: dict[str, Optimizer],
    config: RunConfig[Any],
    device: torch.device,
) -> None:
    """Do to the modules, in place, what the configuration wants of their numbers and memory."""
    training = config.training
    if config.precision == "fp8":  # first, for what is put round a forward calls the one it finds
        load_torchao("precision fp8")
        from trainer.precision.fp8 import set_fp8

        set_fp8(modules, config, device)
    set_precisions(modules, config, device)  # innermost, so that whoever calls one calls it so
    set_checkpoints(modules, config)
    if training.channels_last:
        set_channels_last(modules, optimizers)
    if training.weights == "bf16" and config.precision == "bf16":
        set_bf16_weights(modules, optimizers)
        if training.rounding == "stochastic":
            load_torchao("training.rounding stochastic")
            from trainer.precision.stochastic_rounding import set_stochastic_rounding

            set_stochastic_rounding(optimizers, training)


def compiled(module: nn.Module, training: Training) -> Any:
    """Return a module compiled: in other modes than torch's own, by CUDA graphs."""
    if training.compile_mode == "default":
        return torch.compile(module)
    return torch.compile(module, mode=training.compile_mode)
