"""The dtype in which a loop computes, from the graph of its first backward passes."""

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.telemetry.event_fields import DType

MOST_NODES = 2_000
#: Node names of operations that autocast runs in half precision.
WIDE = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Linear", "Mv", "Addbmm", "ScaledDot")


def computing_type(roots: Any) -> DType | None:
    """Return the dtype of most matrix products and convolutions; None if there are none.

    Also None for a compiled graph, which is a single node.
    """
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn]
    seen, dtypes = set(waiting), Counter[torch.dtype]()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node.name().startswith(WIDE):
            dtypes.update(metadata.dtype for metadata in node._input_metadata[:1])
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    if not dtypes:
        return None
    return cast("DType", str(dtypes.most_common(1)[0][0]).removeprefix("torch."))
