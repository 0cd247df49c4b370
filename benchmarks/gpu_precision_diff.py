"""Cost of a precision diff on a GPU, in steps and in memory, at common sizes.

    python -m benchmarks.gpu_precision_diff                       (a CUDA device)
    python -m benchmarks.gpu_precision_diff --device cpu --small  (to try it out)

The `mlp` of PyTorch's AMP recipe and the `gpt` at 124 M parameters, in fp16 with a scaler. Memory
is the peak of tensors in a step and in a diff, with the weights and the optimizer's state.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import report
from halfstep.precision_lab.diff import diff_of
from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig, parse_config
from trainer import machine
from trainer.data.sources import drawn
from trainer.recipes.gpt import GPT
from trainer.recipes.mlp import MLP
from trainer.repeatability import seed_everything
from trainer.setup import make_recipe
from trainer.several_losses import as_losses
from trainer.step import make_autocast, make_scaler

ROUNDS = 5
BAR_STEPS, BAR_MEMORY = 6.0, 1.3
FULL: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "mlp 3 × 4096, batch 512": (MLP, {"recipe": {"width": 4096}, "training": {"batch_size": 512}}),
    "gpt 124 M": (
        GPT,
        {
            "recipe": {"layers": 25, "width": 640, "heads": 10, "context": 1024},
            "training": {"batch_size": 8},
        },
    ),
}
SMALL: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "mlp 3 × 64": (MLP, {"recipe": {"width": 64}, "training": {"batch_size": 32}}),
    "gpt small": (
        GPT,
        {
            "recipe": {"layers": 2, "width": 64, "heads": 2, "context": 32, "max_bytes": 65536},
            "training": {"batch_size": 4},
        },
    ),
}


def main() -> None:
    """Print the table, or that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    options = parser.parse_known_args()[0]
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no usable GPU on this machine: nothing was measured.")
    rows, steps, memory = [], [], []
    for name, (recipe_class, values) in (SMALL if options.small else FULL).items():
        config = parse_config(recipe_class, {"precision": "fp16", **values})
        (step, step_peak), (diff, diff_peak) = _costs(recipe_class, config, device)
        steps.append(diff / step)
        memory.append(diff_peak / step_peak if step_peak else math.nan)
        peaks = (f"{peak / 1e9:.2f}" for peak in (step_peak, diff_peak))
        times = f"{step * 1e3:.1f}", f"{diff * 1e3:.1f}", f"{steps[-1]:.1f}"
        rows.append((name, *times, *peaks, f"{memory[-1]:.2f}"))
    report(
        "gpu_precision_diff",
        f"a diff takes at most {BAR_STEPS} steps and {BAR_MEMORY} times a step's memory",
        (
            machine.device_name(device),
            "step, ms",
            "diff, ms",
            "steps",
            "peak of a step, GB",
            "of a diff, GB",
            "times",
        ),
        rows,
        measured=f"{max(steps):.1f} steps, {max(memory):.2f} times",
        passed=max(steps) <= BAR_STEPS and max(memory) <= BAR_MEMORY,
    )


def _costs(
    recipe_class: type[Recipe], config: RunConfig[Any], device: torch.device
) -> list[tuple[float, int]]:
    """Return seconds and bytes of a step and of a diff."""
    seed_everything(0)
    recipe = make_recipe(recipe_class, config, device)
    scaler, autocast = make_scaler(config, device), make_autocast(config, device)
    batch = drawn(recipe, torch.arange(config.training.batch_size), device)
    [optimizer] = recipe.optimizers.values()

    def loss() -> Tensor:
        first = next(iter(recipe.training_step(batch)))
        return torch.stack([each.value for each in as_losses(first)]).sum()

    def step() -> None:
        optimizer.zero_grad()
        with autocast:
            value = loss()
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    def diff() -> None:
        diff_of(tuple(recipe.modules.values()), loss, torch.float16, scaler.get_scale())

    return [_measure(each, device) for each in (step, diff)]


def _measure(call: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Return the median seconds of a call, and its peak bytes of tensors."""
    seconds = []
    call()  # libraries load, algorithms are chosen
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(ROUNDS):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return statistics.median(seconds), peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
