"""Helpers that run a training loop unchecked and checked, and compare its results as bytes."""

import ctypes
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.check.session import CheckedLoop, CheckedSteps
from halfstep.diagnosis.observations import Observation

Loop = Callable[[], Any]  # trains, and returns everything that can differ


def bare(loop: Loop) -> Any:
    """Return the results and random states of an unchecked loop, as bytes."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    results = loop()
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    return bits([results, states])


def check_loop(loop: Loop, schedule: CheckedSteps | None = None) -> tuple[Any, CheckedLoop]:
    """Return the results of a checked loop, and its check."""
    with CheckedLoop(schedule or CheckedSteps(steps=0)) as check:
        results = bare(loop)
    return results, check


def faults(check: CheckedLoop) -> list[Observation]:
    """Return the faults that a check has found."""
    return [each for each in check.found() if each.is_fault]


def assert_equal_and_healthy(loop: Loop) -> CheckedLoop:
    """Assert that the check of a healthy loop changes no bit and finds no fault."""
    expected = bare(loop)
    results, check = check_loop(loop)
    assert results == expected
    assert not check.get_unexamined().errors
    assert check.steps
    assert not faults(check)
    return check


def bits(value: Any) -> Any:
    """Return a value with each tensor and array as its dtype, shape and bytes."""
    if isinstance(value, nn.Module):
        return bits(value.state_dict())
    if isinstance(value, Tensor):
        return _bits_of_tensor(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return [(key, bits(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return repr(value)


def _bits_of_tensor(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce()
        return [bits(tensor.indices()), bits(tensor.values())]
    tensor = tensor.resolve_conj().contiguous()
    # Not bytes() of its storage, which makes a tensor of each byte.
    content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return str(tensor.dtype), tuple(tensor.shape), content


def train(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    is_scaled: bool = True,
    steps: int = 3,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Any:
    """Train with autocast and a scaler, and return losses and all states."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", enabled=is_scaled, init_scale=256.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            value = loss()
        losses.append(value.detach().clone())
        backward(scaler.scale(value))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return losses, model, optimizer.state_dict(), scaler.state_dict()
