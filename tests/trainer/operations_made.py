"""Parts of the tests of operations that other tests use, too."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counter(TorchDispatchMode):
    """Counts operations; one over a list of tensors is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
