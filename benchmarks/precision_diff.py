"""What a precision diff costs, in steps and in memory, and whether the training stays the same.

Each recipe trains in processes of its own, in one thread: once with steps only, once with diffs
between them. A step is forward, backward and update under autocast. Memory is the process's largest
resident set, less what it was before training; what is freed goes back to the system at once.
"""

import os
import resource
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from benchmarks.accumulation_memory import ENVIRONMENT
from benchmarks.report import report
from halfstep.config_groups import Precision
from halfstep.precision_lab.diff import diff_of
from trainer.data.sources import drawn
from trainer.diagnosis.recipe_checks import small_config
from trainer.registry import load_recipe
from trainer.repeatability import seed_everything
from trainer.setup import make_recipe
from trainer.step import as_losses, make_autocast

RECIPES = ("digits", "gpt", "erfnet")
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16")
STEPS, DIFFS = 5, 2
BATCH_SIZE = 2
BAR = 6.0
#: The bar is for steps that take at least so long: a diff also costs about a millisecond per call.
LEAST_SECONDS = 0.05
CPU = torch.device("cpu")
SCALE = {"fp16": 1024.0, "bf16": 1.0}


class Cost(NamedTuple):
    """Figures of one process."""

    step_seconds: float
    diff_seconds: float
    memory_mib: float
    weights: list[bytes]


def measure(name: str, precision: Precision, *, with_diffs: bool) -> Cost:
    """Train some steps, with a diff before each of the last ones."""
    torch.set_num_threads(1)
    recipe_class = load_recipe(name)
    config = small_config(recipe_class, {}, precision, batch_size=BATCH_SIZE)
    seed_everything(0)
    recipe = make_recipe(recipe_class, config, CPU)
    batch = drawn(recipe, torch.arange(BATCH_SIZE), CPU)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def loss() -> Tensor:
        with make_autocast(config, CPU):
            return _first_loss()

    def _first_loss() -> Tensor:
        first = next(iter(recipe.training_step(batch)))
        return torch.stack([each.value for each in as_losses(first)]).sum()

    def step() -> None:
        for optimizer in recipe.optimizers.values():
            optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        for optimizer in recipe.optimizers.values():
            optimizer.step()

    def diff() -> None:
        diff_of(tuple(recipe.modules.values()), _first_loss, dtype, SCALE[precision])

    before = psutil.Process().memory_info().rss
    steps, diffs = [], [0.0]
    for number in range(STEPS):
        if with_diffs and number >= STEPS - DIFFS:
            diffs.append(_timed(diff))
        steps.append(_timed(step))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    weights = [
        tensor.detach().numpy().tobytes()
        for module in recipe.modules.values()
        for tensor in module.state_dict().values()
    ]
    return Cost(
        statistics.median(steps[1:]),
        statistics.median(diffs[1:] or diffs),
        (peak - before) / 2**20,
        [*weights, torch.get_rng_state().numpy().tobytes()],
    )


def alone(name: str, precision: Precision, *, with_diffs: bool) -> Cost:
    """Measure in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, name, precision, with_diffs=with_diffs).result()


def main() -> None:
    """Print the table."""
    os.environ |= ENVIRONMENT
    rows, ratios, are_equal = [], [], True
    for name in RECIPES:
        for precision in PRECISIONS:
            plain = alone(name, precision, with_diffs=False)
            cost = alone(name, precision, with_diffs=True)
            is_equal = plain.weights == cost.weights
            ratio = cost.diff_seconds / cost.step_seconds
            if cost.step_seconds >= LEAST_SECONDS:
                ratios.append(ratio)
            are_equal &= is_equal
            rows.append(
                (
                    name,
                    precision,
                    f"{1000 * cost.step_seconds:.0f}",
                    f"{ratio:.1f}",
                    f"{plain.memory_mib:.0f}",
                    f"{cost.memory_mib / plain.memory_mib:.2f}",
                    "yes" if is_equal else "NO",
                )
            )
    report(
        "precision_diff",
        f"a diff takes ≤ {BAR:g} steps of ≥ {1000 * LEAST_SECONDS:g} ms, and changes no bit",
        (
            "recipe",
            "precision",
            "step, ms",
            "diff, steps",
            "memory of steps, MiB",
            "× with diffs",
            "same bits",
        ),
        rows,
        measured=f"{max(ratios):.1f} steps at most, {'the same' if are_equal else 'OTHER'} bits",
        passed=max(ratios) <= BAR and are_equal,
    )


def _timed(call: Callable[[], None]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


if __name__ == "__main__":
    main()
