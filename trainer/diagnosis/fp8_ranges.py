"""Ranges of fp8 layers, at the interval of headroom: largest magnitudes and underflow to 0.

Measured by hooks that exist only in those steps; not with torch.compile.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, Fp8, Fp8Module
from trainer.observers import CopyingObserver
from trainer.optimizers import StepResult
from trainer.precision.module_names import named

KINDS = ("activation", "weight", "gradient")


class Fp8Ranges(CopyingObserver):
    """Measures casts to fp8 at an interval."""

    is_diagnosis = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: RunConfig,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__(on_event)
        is_enabled = config.precision == "fp8" and not config.training.compile
        self._every_steps = config.diagnosis.headroom_every_steps if is_enabled else 0
        self._names = dict(_in_fp8(modules)) if is_enabled else {}
        self._is_set_aside = False
        self._hooks: list[RemovableHandle] = []
        self._ranges: dict[tuple[str, str], Tensor] = {}

    def before_step(self, step: int) -> None:
        """Register the hooks, if the step is due."""
        self._step = step
        if self._every_steps and step % self._every_steps == 0:
            self._ranges = {}
            self._hooks = [layer.register_forward_hook(self._on_forward) for layer in self._names]

    def after_step(self, result: StepResult) -> None:
        """Queue the copy of the measurements, and report complete copies."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._ranges:
            report = partial(self._report, self._step, list(self._ranges))
            self._host_copies.send(report, torch.stack([*self._ranges.values()]))
            self._ranges = {}
        self._host_copies.report()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the measurement: the work is not part of the step."""
        self._is_set_aside = True
        try:
            yield
        finally:
            self._is_set_aside = False

    def _on_forward(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._is_set_aside or not (layer.training and torch.is_grad_enabled()):
            return
        self._note(layer, "activation", inputs[0].to(output.dtype))
        self._note(layer, "weight", layer.weight)  # type: ignore[arg-type]
        if output.requires_grad:
            output.register_hook(partial(self._note, layer, "gradient"))  # type: ignore[no-untyped-call]

    def _note(self, layer: nn.Module, kind: str, tensor: Tensor) -> None:
        from trainer.precision.fp8 import ranges  # with torchao

        if not self._hooks or not tensor.numel():
            return
        measured = ranges(layer, kind, tensor)
        before = self._ranges.get(key := (self._names[layer], kind), torch.zeros_like(measured))
        largest = torch.maximum(before[:1], measured[:1])
        self._ranges[key] = torch.cat([largest, before[1:] + measured[1:]])

    def _report(self, step: int, keys: list[tuple[str, str]], arrived: list[Tensor]) -> None:
        modules: dict[str, dict[str, Any]] = {}
        for (name, kind), (largest, lost, there) in zip(keys, arrived[0].tolist(), strict=True):
            blank = {"name": name} | {
                field: None for prefix in KINDS for field in (prefix, f"{prefix}_underflow")
            }
            module = modules.setdefault(name, blank)
            module[kind] = largest
            module[f"{kind}_underflow"] = lost / there if there else 0.0
        self._on_event(Fp8(step=step, modules=[Fp8Module(**fields) for fields in modules.values()]))


def _in_fp8(modules: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers that multiply in fp8; a shared layer's first name comes last."""
    from torchao.float8.float8_linear import Float8Linear

    for name, module in reversed(list(named(modules))):
        if isinstance(module, Float8Linear):
            yield module, name
