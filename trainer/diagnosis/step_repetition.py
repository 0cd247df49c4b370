"""Repetition of a step from what was stored of it, without an effect on the run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.diagnosis.defect import Defect, Site
from halfstep.diagnosis.observations import EXPLAINING_SKIPS
from halfstep.recording.gradients import count_nonfinite, module_names
from halfstep.shadow.armed_steps import recordable
from halfstep.shadow.sanitizer import Sanitizer
from halfstep.telemetry import events
from halfstep.telemetry.events import ReplayCulprit
from trainer.checkpoints.checkpoint import random_state, restore_random_state
from trainer.distributed.ranks import Ranks

if TYPE_CHECKING:
    from trainer.step import StepContext

OUTSIDE = "training_step"  # outside of any module's call: mostly the loss


@dataclass
class StoredStep:
    """Data needed to repeat a step."""

    number: int
    position: int  # of the sampler, before the step
    random: dict[str, object] | None  # None: unknown
    buffers: list[Tensor]
    state: dict[str, Any] | None  # the recipe's own; None: unknown
    scale: Tensor | float = 1.0
    losses: int | None = None  # number of times training_step yielded; None: unknown


class StepRepetition:
    """Stores steps and repeats them, on the plain networks of this process."""

    def __init__(
        self,
        context: "StepContext",
        modules: Mapping[str, nn.Module],
        device: torch.device,
        suspended: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """suspended: suspends the observers of a step's work."""
        self._context, self._modules = context, dict(modules)
        self._device, self._suspended = device, suspended

    def store(self, step: int) -> StoredStep:
        """Return what a repetition of this step needs, before its batch is drawn."""
        return StoredStep(
            step,
            self._context.batches.position,
            random_state(self._device),
            [buffer.clone() for buffer in self._buffers()],
            deepcopy(self._context.recipe.state_dict()),
        )

    def repeat(self, stored: StoredStep, notes: list[str], *, is_requested: bool) -> events.Replay:
        """Repeat a step, and return what made it nonfinite. notes: what makes it inexact."""
        recipe, networks = self._context.recipe, self._context.recipe.modules
        if any(networks[name] is not module for name, module in self._modules.items()):
            notes = [*notes, "the plain network was replayed, on this process's examples"]
        scale = float(stored.scale)  # from here on the host may wait
        with self.restore_afterwards():
            recipe.modules = self._modules
            # A gradient penalty needs the scale of this step, not of the next one.
            recipe.scaler = GradScaler(
                self._device.type, init_scale=scale, enabled=recipe.scaler.is_enabled()
            )
            if stored.random is not None:
                restore_random_state(stored.random, self._device)
            if stored.state is not None:
                recipe.load_state_dict(stored.state)
            self._set_buffers(stored.buffers)
            found: list[Defect] = []
            sanitizer = Sanitizer(found.extend)
            for name, module in self._modules.items():
                names = module_names((module,))
                sanitizer.names.add({m: f"{name}.{path}" for m, path in names.items()})
                sanitizer.names.add({module: name})
            sanitizer.arm(stored.number)
            try:
                loss, gradients = self._repeat_passes(sanitizer, stored, scale)
                sanitizer.judge_gradients(list(gradients.values()))
                sanitizer.next_step(stored.number)
            finally:
                sanitizer.disarm()
            culprits = self._culprits(gradients)
        defect = next(
            (candidate for candidate in found if candidate.kind in EXPLAINING_SKIPS), None
        )
        site = defect.site if defect else Site()
        return events.Replay(
            step=stored.number,
            exact=not notes,
            notes=notes,
            requested=is_requested,
            scale=scale,
            found=defect is not None,
            module=(site.module or OUTSIDE) if defect else None,
            direction=None if not defect else "backward" if site.node else "forward",
            operation=(site.node or site.operator) if defect else None,
            kind=None,
            dtype=defect.dtype if defect else None,
            largest_input=None,
            limit=defect.limit if defect else None,
            loss_nonfinite=not bool(loss.isfinite()),
            culprits=culprits,
            defect=defect and recordable(defect),
        )

    @contextmanager
    def restore_afterwards(self) -> Iterator[None]:
        """Restore everything that a replay changes, also after an error.

        The observers of a step's work are suspended meanwhile.
        """
        with self._suspended():
            recipe = self._context.recipe
            networks, scaler = recipe.modules, recipe.scaler
            random, state = random_state(self._device), deepcopy(recipe.state_dict())
            buffers = [buffer.clone() for buffer in self._buffers()]
            # Between two losses a recipe may change weights, e.g. clip them.
            weights = self._weights() if len(recipe.optimizers) > 1 else []
            copies = [weight.detach().clone() for weight in weights]
            try:
                yield
            finally:
                recipe.modules, recipe.scaler = networks, scaler
                self._set_buffers(buffers)
                with torch.no_grad():
                    for weight, copy in zip(weights, copies, strict=True):
                        weight.copy_(copy)
                recipe.load_state_dict(state)
                restore_random_state(random, self._device)

    def _repeat_passes(
        self, sanitizer: Sanitizer, stored: StoredStep, scale: float
    ) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Repeat the step's passes without updates; return its loss and its gradients.

        Code after the last loss does not run.
        """
        gradients: dict[Tensor, Tensor] = {}
        context, total = self._context, torch.zeros((), dtype=torch.float32, device=self._device)
        batches, losses = self._context.batches.again(stored.position), stored.losses
        count = context.training.accumulation_steps
        if len(context.optimizers) == 1:
            losses = 1
        passes = context.passes(batches, lambda: context.autocast, Ranks())
        for number, (_index, yielded) in enumerate(passes, 1):
            for loss in yielded:
                mean_loss = loss.value / count
                total += mean_loss.detach()
                trained = [p for p in context.parameters(loss) if p.requires_grad]
                scaled_loss = mean_loss * scale
                seed = torch.ones_like(scaled_loss)
                sanitizer.loss(mean_loss)
                sanitizer.scale_by(scale, seed)
                sanitizer.backward_begins([scaled_loss])
                own_gradients = torch.autograd.grad(
                    *(scaled_loss, trained, seed),
                    allow_unused=True,
                    retain_graph=loss is not yielded[-1],
                )
                sanitizer.backward_ends()
                for parameter, gradient in zip(trained, own_gradients, strict=True):
                    if gradient is not None:
                        before = gradients.get(parameter)
                        gradients[parameter] = gradient if before is None else before + gradient
            if losses is not None and number == losses * count:
                break
        return total, gradients

    def _culprits(self, gradients: Mapping[Tensor, Tensor]) -> list[ReplayCulprit]:
        """Count nonfinite elements by parameter; on a GPU the host waits."""
        counted: list[ReplayCulprit] = []
        for optimizer, watched in self._context.optimizers.items():
            for name, parameter in zip(watched.names, watched.parameters, strict=True):
                gradient = gradients.get(parameter)
                inf, nan = (0, 0) if gradient is None else count_nonfinite(gradient)
                if inf or nan:
                    culprit = ReplayCulprit(optimizer=optimizer, name=name, inf=inf, nan=nan)
                    counted.append(culprit)
        return counted

    def _weights(self) -> list[Tensor]:
        return [weight for module in self._modules.values() for weight in module.parameters()]

    def _buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules.values() for buffer in module.buffers()]

    def _set_buffers(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers(), values, strict=False):
                buffer.copy_(value)
