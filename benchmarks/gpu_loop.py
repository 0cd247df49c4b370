"""The product's loop, and a watched script, beside PyTorch's bare loop on a GPU.

    python -m benchmarks.gpu_loop                       (a CUDA device)
    python -m benchmarks.gpu_loop --device cpu --small  (to try it out)

The `mlp` of PyTorch's AMP recipe (3 × 4096, batch 512) and the `gpt` at 124 M parameters, in fp16
with a scaler. The bare loop and the product's train on the same batches, in turn, some steps of
each, to the device's last kernel; then the bare loop trains with `halfstep.watch`. Printed are the
median paces and their ratios.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfstep
from benchmarks.report import report
from halfstep.clock import clock
from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig, parse_config
from halfstep.telemetry.spool import SpoolWriter
from trainer import machine
from trainer.data.batches import Batches
from trainer.data.sampler import Sampler
from trainer.data.sources import Drawn
from trainer.distributed.ranks import Ranks
from trainer.recipes.gpt import GPT
from trainer.recipes.mlp import MLP
from trainer.repeatability import seed_everything
from trainer.setup import make_context
from trainer.step import make_autocast, make_scaler, train_step

BAR = 0.99
EXAMINED = 110  # steps of a watched script, of which most are examined more closely
Step = Callable[[], None]

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


def bare(
    recipe_class: type[Recipe], config: RunConfig[Any], device: torch.device
) -> tuple[Step, list[nn.Module]]:
    """Return a step of PyTorch's AMP examples, unscale, clip, step, update, and its modules."""
    seed_everything(0)
    recipe = recipe_class(config, device)
    scaler = recipe.scaler = make_scaler(config, device)
    autocast = make_autocast(config, device)
    [optimizer] = recipe.optimizers.values()
    parameters = [p for module in recipe.modules.values() for p in module.parameters()]
    sampler = _sampler(recipe, config, device)
    batches = Batches(sampler, Drawn(recipe, sampler), Drawn(recipe, sampler))

    def step() -> None:
        [batch] = batches.step()
        optimizer.zero_grad()
        with autocast:
            [loss] = recipe.training_step(batch)
        scaler.scale(loss.value).backward()  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step, list(recipe.modules.values())


def product(
    recipe_class: type[Recipe], config: RunConfig[Any], device: torch.device, folder: Path
) -> Step:
    """Return the loop's own step, with all that follows it and a spool on the disk."""
    seed_everything(0)
    recipe = recipe_class(config, device)
    spool = SpoolWriter(folder, 1)
    context, followers = make_context(
        recipe,
        recipe.modules,
        config,
        device,
        Ranks(),
        on_steps=spool.steps,
        on_event=spool.event,
        at=clock(),
    )
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        context.observers.before_step(number)
        context.observers.after_step(train_step(context, context.batches.step()))
        followers.telemetry.tick()

    return step


def watched_paces(
    step: Step, modules: list[nn.Module], options: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """Return milliseconds a step of a watched script: of its first steps, and of later ones."""
    with tempfile.TemporaryDirectory() as folder, halfstep.watch(*modules, folder=folder):
        first = pace(step, EXAMINED, device)
        later = [pace(step, options.steps, device) for _ in range(options.rounds)]
    return first, statistics.median(later)


def pace(step: Step, steps: int, device: torch.device) -> float:
    """Return milliseconds a step, to the device's last kernel."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - started) / steps * 1e3


def main() -> None:
    """Print the table, or say that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25, help="in a row, of either")
    options = parser.parse_known_args()[0]
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no usable GPU on this machine: nothing was measured.")
    torch.set_num_threads(1)
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe_class, values) in (SMALL if options.small else FULL).items():
            config = parse_config(recipe_class, {"precision": "fp16", **values})
            place = Path(folder) / name.replace(" ", "-")
            plain, _ = bare(recipe_class, config, device)
            own = product(recipe_class, config, device, place)
            for loop in (plain, own):
                pace(loop, options.steps, device)  # libraries load, algorithms are chosen
            taken = [
                [pace(loop, options.steps, device) for loop in (plain, own)]
                for _ in range(options.rounds)
            ]
            medians = [statistics.median(column) for column in zip(*taken, strict=True)]
            script, modules = bare(recipe_class, config, device)
            pace(script, options.steps, device)
            first, later = watched_paces(script, modules, options, device)
            ours = [medians[0] / each for each in (medians[1], later)]
            ratios += ours
            paces = (*medians, later, first)
            rows.append((name, *(f"{each:.3f}" for each in paces), *(f"{r:.4f}" for r in ours)))
    report(
        "gpu_loop",
        f"bare ÷ product and bare ÷ watched ≥ {BAR}",
        (
            machine.device_name(device),
            "bare, ms a step",
            "product, ms a step",
            "watched, ms a step",
            f"its first {EXAMINED}",
            "bare ÷ product",
            "bare ÷ watched",
        ),
        rows,
        measured=f"{min(ratios):.4f}",
        passed=min(ratios) >= BAR,
    )


def _sampler(recipe: Recipe, config: RunConfig[Any], device: torch.device) -> Sampler:
    return Sampler(recipe.train_size, config.training, pin=device.type == "cuda")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
