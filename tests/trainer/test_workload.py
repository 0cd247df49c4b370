"""Operations of a step, and the device's peak."""

from typing import ClassVar

import pytest
import torch

from halfstep.run_config import parse_config
from tests.marks import looped
from tests.spool_made import fields_of
from tests.trainer.conftest import CPU, Regression
from trainer.recipes.gpt import GPT
from trainer.recipes.mlp import MLP
from trainer.workload import peak_flops, workload

L, D, T, V = 2, 32, 16, 256  # layers, width, context, bytes
SMALL = {"recipe": {"layers": L, "width": D, "heads": 2, "context": T, "max_bytes": 20_000}}


class Counted(Regression):
    """A recipe that reports its size."""

    tokens_per_example: ClassVar = 7

    def flops(self):
        return 100.0


class Raising(Regression):
    """A recipe that raises when its size is counted."""

    def flops(self):
        raise RuntimeError("no operations known")


@pytest.mark.slow
def test_a_transformer_takes_what_the_formula_says() -> None:
    """A transformer has six operations per weight and token, and twelve per layer, width and
    pair of tokens; no number is drawn.
    """
    config = parse_config(GPT, SMALL)
    recipe = GPT(config, CPU)
    before = torch.get_rng_state()
    weights = L * 12 * D * D + V * D  # biases and norms are no products
    assert recipe.flops() == 6 * weights * T + 12 * L * D * T * T
    assert torch.equal(torch.get_rng_state(), before)
    assert recipe.tokens_per_example == T


def test_linear_layers_take_six_a_weight_but_the_first_needs_no_gradient_of_its_input() -> None:
    """Linear layers take six operations per weight, but the first no gradient of its input."""
    recipe = MLP(parse_config(MLP, {"recipe": {"width": 8, "layers": 3, "batches": 1}}), CPU)
    assert recipe.flops() == 3 * 6 * 64 - 2 * 64


def test_a_step_is_of_all_micro_batches_and_devices() -> None:
    """Examples, tokens and operations count all micro-batches and devices; a CPU has no peak."""
    training = {"batch_size": 4, "accumulation_steps": 2}
    config = parse_config(Counted, {"training": training})
    assert fields_of(workload(Counted(config, CPU), config, CPU, devices=3)) == {
        "event": "workload",
        "step": 0,
        "examples": 24,
        "tokens": 168,
        "flops": 2400.0,
        "peak_flops": None,
        "device": "cpu",
    }


@looped(
    "name, values, tera",
    [
        ("NVIDIA A100-SXM4-80GB", {"precision": "fp16"}, 312),
        ("NVIDIA A100-PCIE-40GB", {"precision": "fp32", "training": {"tf32": True}}, 156),
        ("NVIDIA H100 80GB HBM3", {"precision": "bf16"}, 989.4),
        ("NVIDIA H100 PCIe", {"precision": "fp32"}, 51),
        ("Tesla T4", {"precision": "bf16"}, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"precision": "fp16"}, None),
        ("NVIDIA GeForce RTX 5090", {"precision": "fp16"}, None),
    ],
)
def test_of_a_device_that_is_not_listed_nothing_is_claimed(
    name: str, values: dict[str, object], tera: float | None
) -> None:
    """An unlisted device, a slice of one, and an unsupported precision have no peak."""
    peak = peak_flops(name, parse_config(Regression, values))
    assert peak == (None if tera is None else pytest.approx(tera * 1e12))


def test_a_loop_reports_it_once_and_survives_a_failing_count(run_loop) -> None:
    """The workload is reported before the first step; an error of it is a failed diagnosis."""
    run = run_loop(Counted)
    assert [each["examples"] for each in run.of("workload")] == [8]
    run = run_loop(Raising)
    assert run.of("workload") == []
    assert [each["diagnosis"] for each in run.of("failed_diagnosis")] == ["count of the workload"]
    assert run.outcome.step == 5
