"""Counts the floating-point operations of a training step. This module imports torch."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


def count_flops(loss: Callable[[], Tensor]) -> int:
    """Count the operations of a loss computation and its backward pass.

    Create modules and inputs within `torch.device("meta")`: nothing is computed, no random number
    is drawn, and no memory is allocated. Only matrix products and convolutions are counted, as is
    usual for device utilisation.
    """
    with FlopCounterMode(display=False) as counter:
        loss().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
