"""Calls of the parts of a watched loop, kept apart from the training. This module imports torch."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import cuda
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from halfstep.watching.async_host_copy import is_capturing


class Guard(Protocol):
    """Keeps exceptions and signals out of the training while the listener is called."""

    held: int  # calls under way; above 0 a signal is deferred and sets is_due
    is_due: bool

    def handle_error(self, error: Exception) -> None:
        """Handle an exception of the listener."""

    def terminate(self) -> None:
        """Handle the deferred signal."""


def keep_from_compiler(function: Any, *, with_callees: bool = False) -> None:
    """Break the graph at this function, like torch.compiler.disable, whose import is slow."""
    function._torchdynamo_disable = True
    beyond = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    strategy = _FrameExecStrategy(_FrameAction.SKIP, beyond)
    set_code_exec_strategy(function.__code__, strategy)


class Listener:
    """What the wrappers call, while it is armed."""

    guard: Guard

    def __init__(self) -> None:
        self.is_armed = False

    def call(self, call: Callable[..., None], *given: object, **named: object) -> None:
        """Call a listener. Wrappers of each step's calls have the same lines in them."""
        if not self.is_armed or (cuda._initialized and is_capturing()):
            return
        guard = self.guard
        guard.held += 1
        try:
            call(*given, **named)
        except Exception as error:
            guard.handle_error(error)
        finally:  # KeyboardInterrupt propagates
            guard.held -= 1
        if guard.is_due and not guard.held:
            guard.terminate()
