"""A counter of the operators that code dispatches."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: Operators that only make views or allocate: no kernel.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("detach", "view", "t", "select", "slice", "unbind", "as_strided", "expand", "alias"),
        *("unsqueeze", "squeeze", "reshape", "_unsafe_view", "transpose", "lift_fresh", "detach_"),
        *("empty", "empty_like", "empty_strided"),
    )
)


class Operators(TorchDispatchMode):
    """A mode that counts operators by name; one for a list of tensors counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if name.startswith("aten.") and name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
