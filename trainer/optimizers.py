"""Optimizers that return skips and gradient norms as device tensors.

The host does not read them here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from halfstep.recipe import RecipeError
from halfstep.recording.gradients import count_nonfinite, elements
from halfstep.recording.reader import Counts
from trainer.distributed.shards import counts_of_whole, group_of, local, norms_of_whole

HALF = (torch.float16, torch.bfloat16)


class Update(NamedTuple):
    """The result of one optimizer in one step: tensors on the device, not read by the host."""

    found_inf: Tensor  # 0-dim: 1 if the scaler skipped it
    norms: Sequence[Tensor]  # (P,) 0-dim: L2 of each parameter's gradient, before the clip
    factor: Tensor  # 0-dim: what the norms still include, the loss scale or 1
    clipped_norm: Tensor | None = None  # 0-dim: L2 over all after a clip by value
    #: Only on a CPU: on a GPU the host would have to wait, as it does in a replay.
    counts: Counts | None = None


class StepResult(NamedTuple):
    """The result of one step."""

    loss: Tensor  # 0-dim, on the device
    scale: Tensor  # 0-dim: the one used for this step, until the scaler updates it in place
    updates: dict[str, Update]  # of every optimizer; zeros if it took no part
    stepped: set[str]  # the optimizers that took part
    rate: float | Tensor = 0.0  # learning rate: a tensor if only the device knows it
    losses: int = 1  # number of losses that training_step yielded


class WatchedOptimizer:
    """An optimizer that returns, without synchronisation, whether the scaler skipped it.

    A fused optimizer is always called: during its step it has `found_inf`, on the device, and skips
    inside its kernel. An unfused one is called only if no inf was found, after the scaler has asked
    the device (that wait is PyTorch's own). One pre-hook distinguishes all cases.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.names = list(parameters)  # in forward order
        self.parameters = list(parameters.values())
        device = self.parameters[0].device
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self.one = torch.ones_like(self._zero)
        self._found_inf = self._zero
        #: Process group with the rest of the parameters; None: all are whole.
        self.shared_with = group_of(self.parameters)
        is_fp32 = all(p.dtype == torch.float32 for p in self.parameters)
        self._norm_dtype = None if is_fp32 else torch.float32
        # Result of a step without a loss for this optimizer.
        self.idle = Update(self._zero, [self._zero] * len(self.names), self.one, self._zero)
        self.takes_norms = True  # in this step
        self.unknown = torch.full_like(self._zero, math.nan)  # factor of norms not taken
        optimizer.register_step_pre_hook(self._keep_found_inf)

    @property
    def rate(self) -> float | Tensor:
        """Learning rate of the first group: a tensor if only the device knows it."""
        rate = self.optimizer.param_groups[0]["lr"]
        return (
            rate if isinstance(rate, Tensor) and rate.device == self._zero.device else float(rate)
        )

    @property
    def has_hooks(self) -> bool:
        """Whether the recipe has hooks before this optimizer's step, which read its gradients."""
        return len(self.optimizer._optimizer_step_pre_hooks) > 1  # one is ours

    def drop_gradients(self) -> None:
        """Delete all gradients, like `zero_grad(set_to_none=True)` without its profiling."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norms(self) -> Sequence[Tensor]:
        """Return the L2 norm of each parameter's gradient, (P,) 0-dim in fp32; 0 if it has none."""
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        if not gradients:
            raise RecipeError(
                f"the loss gave no parameter of its optimizer a gradient: {', '.join(self.names)}. "
                "Check whether training_step detaches the model's output or names another optimizer"
            )
        if any(gradient.is_sparse for gradient in gradients):
            self._check_sparse()
            gradients = [elements(gradient) for gradient in gradients]
        norms: Sequence[Tensor] = torch._foreach_norm(gradients, dtype=self._norm_dtype)
        if len(gradients) < len(self.parameters):
            present = iter(norms)
            norms = [self._zero if p.grad is None else next(present) for p in self.parameters]
        if self.shared_with is None:
            return norms
        return norms_of_whole(torch.stack(list(norms)), self.shared_with).unbind()

    def step(self, scaler: GradScaler) -> Tensor:
        """Call the scaler, which steps or skips; return found_inf, 0-dim: 1 if it skipped."""
        self._found_inf = self.one  # stays if the hook does not run: an unfused skip
        scaler.step(self.optimizer)
        return self._found_inf

    def count_nonfinite(self, norms: Sequence[Tensor]) -> Counts:
        """Return Update.counts for these norms. The host waits.

        Call it before a clip, which spreads a NaN.
        """
        own = {
            position: count_nonfinite(local(gradient))
            for position, norm in enumerate(torch.stack(list(norms)).tolist())
            if not math.isfinite(norm) and (gradient := self.parameters[position].grad) is not None
        }
        return counts_of_whole(own, self.shared_with)

    def check_elements_can_be_clipped(self) -> None:
        """Raise RecipeError if a gradient is sparse: torch can clip those only by norm."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RecipeError(
                    f"the gradient of {name} is sparse, and torch cannot clip its elements: leave "
                    "training.max_grad_value empty, or give its Embedding sparse=False"
                )

    def _check_sparse(self) -> None:
        """Raise RecipeError if this optimizer has no kernel for sparse gradients."""
        if not any(group.get("fused") for group in self.optimizer.param_groups):
            return
        sparse = (
            name
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if parameter.grad is not None and parameter.grad.is_sparse
        )
        raise RecipeError(
            f"the gradient of {next(sparse)} is sparse, which torch's fused optimizers do not "
            "support: give its optimizer fused=False (SGD, Adagrad or SparseAdam), or its "
            "Embedding sparse=False"
        )

    def _keep_found_inf(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Of a fused optimizer: a sum over devices, which nothing changes in place.
        self._found_inf = getattr(optimizer, "found_inf", self._zero)


def prepare_momentum(optimizers: Mapping[str, Optimizer]) -> None:
    """Initialise the momentum of fused SGD before the first step, which may be skipped.

    torch allocates it uninitialised for the kernel to fill, which a skipped step does not do: the
    next step would use arbitrary values. Zeros are equivalent to torch's own first step, unless
    there is dampening. (Adam, AdamW and Adagrad start with zeros.)
    """
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, torch.optim.SGD):
            continue
        for group in optimizer.param_groups:
            if not (group["fused"] and group["momentum"]):
                continue
            if group["dampening"]:
                raise RecipeError(
                    f'optimizer "{name}" is a fused SGD with dampening {group["dampening"]}: if '
                    "its first step were skipped, it would use uninitialised memory. "
                    "Set dampening to 0 or fused to False"
                )
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def watch_optimizers(
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    *,
    is_scaled: bool = False,
) -> dict[str, WatchedOptimizer]:
    """Return the optimizers as WatchedOptimizer, with parameters "<module>.<parameter>".

    Parameters are in forward order.  is_scaled: by a loss scaler.  Raises RecipeError for
    parameters that cannot be trained: in fp16, in bf16 with a scaler, or in no module.
    """
    names = {
        parameter: f"{module}.{name}"
        for module, network in modules.items()
        for name, parameter in network.named_parameters()
    }
    watched = {}
    for optimizer_name, optimizer in optimizers.items():
        check_kind(optimizer_name, optimizer)
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if strangers := own - names.keys():
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers)
            raise RecipeError(
                f'optimizer "{optimizer_name}" has parameters of shape {shapes} that are in none '
                f"of the recipe's modules ({', '.join(modules)}), so they would not be saved; add "
                "their module to self.modules"
            )
        parameters = {name: parameter for parameter, name in names.items() if parameter in own}
        for name, parameter in parameters.items():
            if parameter.dtype == torch.float16 or (is_scaled and parameter.dtype in HALF):
                raise RecipeError(
                    f"parameter {name} is {parameter.dtype}: leave the model in torch.float32 "
                    "(no .half()); autocast casts where it is safe. A fused optimizer would "
                    "silently accept half-precision gradients, and lose small updates. (bf16 is "
                    "allowed without loss scaling: precision bf16 or fp32)"
                )
        check_kernel(optimizer_name, optimizer)
        watched[optimizer_name] = WatchedOptimizer(optimizer, parameters)
    return watched


def check_kernel(name: str, optimizer: Optimizer) -> None:
    """Raise RecipeError for fused SGD with bf16 weights on a CPU, whose kernel does nothing.

    https://github.com/pytorch/pytorch/issues/191763, in torch up to 2.13
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        weights = (weight for weight in group["params"] if weight.device.type == "cpu")
        if group["fused"] and any(weight.dtype == torch.bfloat16 for weight in weights):
            raise RecipeError(
                f'optimizer "{name}" is a fused SGD of weights in bf16, whose kernel on a CPU does '
                "not change them: give it fused=False (training.fused), or use AdamW"
            )


def check_kind(name: str, optimizer: object) -> None:
    """Raise RecipeError for objects that are not optimizers, or that a scaler cannot step."""
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise RecipeError(f'optimizer "{name}" is a {kind}; allowed: a torch.optim.Optimizer')
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecipeError(
            f'optimizer "{name}" is LBFGS, which evaluates the loss several times per step: '
            "neither a loss scaler nor this loop supports it"
        )
