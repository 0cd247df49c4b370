"""Modules that a setting names but the first step does not call.

An example is the out_proj of a MultiheadAttention, which uses its weights directly. Hooks exist
only in the first step, and never in a compiled network, which they would recompile.
"""

from collections.abc import Callable, Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, Uncalled
from trainer.observers import Observer
from trainer.optimizers import StepResult
from trainer.precision.module_names import chosen


class UnusedModules(Observer):
    """Checks which modules the first step calls."""

    is_diagnosis = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: RunConfig,
        on_event: Callable[[Event], None],
    ) -> None:
        self._on_event = on_event
        settings = {} if config.training.compile else config.modules.model_dump()
        self._waiting = {
            name: module
            for field, patterns in settings.items()
            for name, module in chosen(modules, f"modules.{field}", patterns).items()
        }
        self._hooks: list[RemovableHandle] = []
        self._step = 0

    def before_step(self, step: int) -> None:
        """Register hooks on the modules."""
        self._step = step
        for name, module in self._waiting.items():
            self._hooks.append(module.register_forward_pre_hook(self._make_hook(name)))

    def reads_inside(self) -> bool:
        """Return whether calls are counted in this step."""
        return bool(self._hooks)

    def after_step(self, result: StepResult) -> None:
        """Report the modules that were not called, once."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks and self._waiting:
            names = list(self._waiting)
            self._on_event(Uncalled(step=self._step, modules=names))
        self._hooks, self._waiting = [], {}

    def _make_hook(self, name: str) -> Callable[..., None]:
        def forget(_module: nn.Module, _args: object) -> None:
            self._waiting.pop(name, None)

        return forget
