"""Code of fixes in half precision: constants stay nonzero, and values at 0 are finite."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.diagnosis import fixes
from tests.marks import looped

SNIPPETS = {name: text for name, text in vars(fixes).items() if name.isupper()}
TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "diagnosis.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n.*?```python\n(.*?)```", TEXT, re.M | re.S))
CODE = SNIPPETS | SECTIONS
HALF = [torch.float16, torch.bfloat16]
#: At the singular point, at the smallest number of fp16, about the bounds, and far above.
POINTS = [0.0, 2.0**-24, 1e-4, 1e-3, 1.0, 100.0]


def constants(code: str) -> Iterator[float]:
    """Yield the floating-point literals of some code."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield node.value


def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Execute a snippet and return its variables."""
    names |= {"torch": torch, "F": F, "device": "cpu"}
    exec(snippet, names)
    return names


@looped("name", CODE)
def test_no_constant_vanishes_in_fp16(name: str) -> None:
    """No constant in a fix rounds to 0 in fp16, nor to 1 unless it is 1."""
    for constant in constants(CODE[name]):
        rounded = torch.tensor(constant, dtype=torch.float16).item()
        assert math.isfinite(rounded), constant
        assert (rounded == 0) == (constant == 0), constant
        assert (rounded == 1) == (constant == 1), constant


@looped("dtype", HALF)
@looped("name", ["norm", "unit", "log", "root"])
def test_singular_points_are_finite_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Root, logarithm and normalization are finite with their gradients, also for zeros only."""
    points = torch.tensor([[0.0] * len(POINTS), POINTS], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype):
        result: Tensor = run(fixes.SINGULAR, x=points)[name]
    result.sum().backward()
    assert result.isfinite().all()
    assert points.grad is not None
    assert points.grad.dtype == dtype
    assert points.grad.isfinite().all()


@looped("gradient", [0.0, 1e-7, 1e-4, 1.0])
@looped("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_eps_of_the_fix_keeps_half_precision_weights_finite(
    gradient: float, optimizer: type[torch.optim.Adam]
) -> None:
    """A fix's eps keeps half-precision weights finite where squared gradients are 0 in fp16."""
    [eps] = constants(fixes.ADAM_EPS.partition("# or: ")[2])
    model = nn.Linear(2, 1).half()
    steps = optimizer(model.parameters(), eps=eps)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        steps.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_fp32_region_of_a_fix_takes_half_precision() -> None:
    """A fix's fp32 region accepts numbers beyond fp16 under autocast."""
    x = torch.full((4, 2), 6e4, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        results = run(fixes.FORWARD, module=nn.Linear(2, 2), x=x)
    assert results["out"].dtype == torch.float32
