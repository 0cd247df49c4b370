"""How many floating-point operations a pass takes. This module imports torch."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


def count_flops(loss: Callable[[], Tensor]) -> int:
    """Count the operations of what computes a loss, and of its backward pass.

    Make its modules and inputs within `torch.device("meta")`: nothing is computed there, no random
    number drawn, and no memory taken. Products alone are counted, as is usual for the utilisation
    of a device.
    """
    with FlopCounterMode(display=False) as counter:
        loss().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
