"""Nonfinite tensors in the training loop at a nonfinite loss.

Searched at the backward pass of the first nonfinite losses, among the local variables of the loop's
own functions and their contents. Of a loss on a device the host does not know whether it is finite:
there the inputs of the first passes are counted, and of passes after a skip. Results with a graph,
parameters and scalars do not count as inputs; a mask of -inf does, and is valid.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.shadow.loop_variables import tensors_in, tensors_of_callers

MOST_ELEMENTS = 2**26  # of a tensor that is searched
MOST_ON_DEVICE = 16  # tensors
SEARCHABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def nonfinite_inputs() -> list[tuple[str, int, int]]:
    """Return the calling loop's nonfinite input tensors: name, number of inf and of NaN.

    Tensors on a device are left out: to read them would wait for the device.
    """
    results: dict[str, tuple[str, int, int]] = {}
    for name, tensor in tensors_of_callers():
        if name not in results and (counts := _counts(tensor)):
            results[name] = (name, *counts)
    return list(results.values())


def device_inputs(device: torch.device) -> tuple[dict[str, Tensor], bool]:
    """Return the calling loop's inputs on a device, and whether there are any and these are all.

    Inputs elsewhere may be what a model gets, by a copy that no variable holds.
    """
    inputs: dict[str, Tensor] = {}
    are_all = True
    for name, tensor in tensors_of_callers():
        if name in inputs or not _may_be_input(tensor):
            continue
        if tensor.device == device and _is_countable(tensor) and len(inputs) < MOST_ON_DEVICE:
            inputs[name] = tensor
        else:
            are_all = False
    return inputs, are_all and bool(inputs)


def counts_of(tensor: Tensor) -> Tensor:
    """Return the numbers of +inf and NaN elements, (2,), on the tensor's device."""
    return torch.stack([tensor.isposinf().sum(), tensor.isnan().sum()])


def nonfinite_tensors(name: str, value: object) -> Iterator[tuple[str, int, int]]:
    """Yield the nonfinite tensors in a value: name, number of inf and of NaN.

    The host waits for those on a device.
    """
    for path, tensor in tensors_in(name, value):
        if counts := _counts(tensor.cpu()):
            yield (path, *counts)


def _counts(tensor: Tensor) -> tuple[int, int] | None:
    """Return the numbers of +inf and NaN elements; None if there are none or it is no input."""
    if not tensor.is_cpu or not _may_be_input(tensor) or not _is_countable(tensor):
        return None
    with torch.no_grad():
        infinite, nan = counts_of(tensor).tolist()
    return (infinite, nan) if infinite or nan else None


def _may_be_input(tensor: Tensor) -> bool:
    return tensor.grad_fn is None and tensor.is_floating_point() and tensor.dim() > 0


def _is_countable(tensor: Tensor) -> bool:
    """Return whether a tensor is small, plain, and of a type that torch can search."""
    is_plain = tensor.layout == torch.strided and not tensor.is_nested
    is_plain = is_plain and tensor.dtype in SEARCHABLE and not hasattr(tensor, "to_local")
    return is_plain and tensor.numel() <= MOST_ELEMENTS
