"""Waits for the device that Halfstep adds to a step, which must be 0.

With a GPU, PyTorch's own debug mode raises at the first wait in 300 steps of the tiny GPT. Without
one, each recipe's step runs on tensors that have no values, in each precision: whatever would make
a host wait reads a value, and raises. (tests/trainer/test_no_sync.py shows that both see it.)
"""

import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.report import report
from benchmarks.telemetry_cost import MeasuredLoop, TinyGPT
from halfstep.config_groups import Precision
from halfstep.run_config import parse_config
from tests.trainer.no_sync_made import attempt_steps
from trainer.registry import MissingRequirementError, list_recipes, load_recipe

PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp32")
#: Settings that add work to a plain step, except those that are documented to wait.
VALUES = {
    "training": {"max_grad_norm": 1.0, "accumulation_steps": 2},
    "diagnosis": {"histogram_every_steps": 1, "headroom_every_steps": 1},
}


def main() -> None:
    """Run steps that must not wait, and count those that try to."""
    rows = _on_a_gpu() if torch.cuda.is_available() else _without_values()
    waits = sum(int(row[2]) for row in rows)
    report(
        "syncs",
        "0 host-device syncs added to a step",
        ("recipe", "precision", "waits", "what the first one was"),
        rows,
        measured=f"{waits} ({'CUDA' if torch.cuda.is_available() else 'meta device, no GPU'})",
        passed=waits == 0,
    )


def _without_values() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in list_recipes():
        for precision in PRECISIONS:
            with pytest.MonkeyPatch.context() as patch:
                try:
                    recipe = load_recipe(name)
                except MissingRequirementError:  # it is not offered here
                    continue
                try:
                    attempt_steps(patch, recipe, {"precision": precision, **VALUES})  # type: ignore[no-untyped-call]
                    rows.append((name, precision, "0", ""))
                except (RuntimeError, NotImplementedError) as error:
                    rows.append((name, precision, "1", str(error).splitlines()[0]))
    return rows


def _on_a_gpu() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    device = torch.device("cuda")
    for precision in PRECISIONS:
        config = parse_config(TinyGPT, {"precision": precision, **VALUES})
        with tempfile.TemporaryDirectory() as folder:
            loop = MeasuredLoop(config, device, Path(folder))
            batch = loop.context.recipe.batch(torch.arange(8), torch.Generator())
            loop.step(1, batch)  # libraries start, which may wait
            torch.cuda.set_sync_debug_mode("error")
            try:
                for number in range(2, 302):
                    loop.step(number, batch)
                rows.append(("tiny GPT", precision, "0", ""))
            except RuntimeError as error:
                rows.append(("tiny GPT", precision, "1", str(error).splitlines()[0]))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return rows


if __name__ == "__main__":
    main()
