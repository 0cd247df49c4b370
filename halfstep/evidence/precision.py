"""The type in which a loop computes, read from the graph of its first backward passes."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

MOST_NODES = 2_000
#: Operations that autocast runs in half precision, by the names of their nodes.
WIDE = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Linear", "Mv", "Addbmm", "ScaledDot")


def computing_type(roots: Any) -> str | None:
    """Return the type of most matrix products and convolutions below roots; None if there is none.

    Of a compiled graph, which is one node, it is not known.
    """
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn]
    seen, found = set(waiting), Counter[torch.dtype]()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node.name().startswith(WIDE):
            found.update(each.dtype for each in node._input_metadata[:1])
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return str(found.most_common(1)[0][0]).removeprefix("torch.") if found else None
