"""Norms of an optimizer's gradients, and counts of their nonfinite elements.

Nothing here waits for a device unless its docstring says so. This module imports torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.monitor.first_clips import BeforeClip
from halfstep.monitor.telemetry_rows import Counts

#: Prefixes that module wrappers add to parameter names.
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


#: Gradients of one optimizer in one step, as numbers on a CPU, else device tensors: L2 norm over
#: all; norm of each, in order of the names; the factor that the latter still include; and, on a
#: CPU, the nonfinite elements by position. A plain tuple, because each step creates one.
Measured: TypeAlias = tuple[Tensor | float, Tensor | list[float], float, Counts | None]


class Gradients:
    """Gradients of an optimizer with parameters of any type and device."""

    def __init__(self, optimizer: Optimizer, name: str, names: Mapping[nn.Parameter, str]) -> None:
        """names: of parameters, in forward order; others are named by group and index."""
        self.optimizer, self.name = optimizer, name
        self.figure = f"gradient norms of {name}"
        own = {
            parameter: f"group{g}.{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        }
        known = {parameter: name for parameter, name in names.items() if parameter in own}
        self.names = list((known | {p: n for p, n in own.items() if p not in known}).values())
        self.parameters = [*known, *(p for p in own if p not in known)]
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.steps = 0  # measured steps
        #: Positions of parameters that require a gradient and have had none yet.
        self.without_gradient = {i for i, p in enumerate(self.parameters) if p.requires_grad}
        is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters)
        self._dtype = torch.float32 if is_half else None  # of the norms; None: the gradients' own
        self._groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        self.is_plain = all(
            p.device == self.device and not hasattr(p, "to_local") and not p.is_complex()
            for p in self.parameters
        )
        self._zero = torch.zeros((), device=self.device)
        self._is_on_host = self._zero.is_cpu
        self.no_norms = torch.zeros(len(self.names), device=self.device)  # without gradients

    def is_current(self) -> bool:
        """Return whether the optimizer's groups still have the same parameters."""
        groups, own = self.optimizer.param_groups, self._groups
        if len(groups) == 1:  # a list of lists costs each step more
            return list(map(id, groups[0]["params"])) == own[0]
        return [list(map(id, group["params"])) for group in groups] == own

    def rate(self) -> float | Tensor:
        """Return the first group's learning rate: NaN if it has none.

        Returns a tensor only if the host cannot read it without waiting.
        """
        groups = self.optimizer.param_groups
        rate = groups[0].get("lr") if groups else None
        if isinstance(rate, float) or (isinstance(rate, Tensor) and not rate.is_cpu):
            return rate
        try:
            return float(rate)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # None in Adafactor with relative steps
            return math.nan

    def measure(
        self, scale: Tensor | None = None, before_clip: Sequence[BeforeClip] = ()
    ) -> Measured | None:
        """Measure the gradients; None if there are none.

        scale: their current factor.  before_clip: each gradient before a clip, if that is known.
        """
        present = [g for p in self.parameters if (g := p.grad) is not None]
        self.steps += 1
        if self.without_gradient:
            self.without_gradient = {
                i for i in self.without_gradient if self.parameters[i].grad is None
            }
        if not present:
            return None
        norms: Sequence[Tensor] = [each.norm for each in before_clip] or self._norms(present)
        if len(present) < len(self.parameters):
            following = iter(norms)
            norms = [self._zero if p.grad is None else next(following) for p in self.parameters]
        if self._is_on_host:
            return self._read(list(map(Tensor.item, norms)), scale, before_clip)
        stacked = torch.stack(list(norms))
        if scale is not None:
            stacked = stacked / scale
        return torch.linalg.vector_norm(stacked), stacked, 1.0, None

    def norms_on_host(self) -> list[float]:
        """Return the norm of each gradient of a CPU's optimizer, if all are plain and present.

        Otherwise raises: `measure` takes any gradients.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        if not self.is_plain or gradients[0].requires_grad:
            raise ValueError("gradients of another kind")
        norms = torch._foreach_norm(gradients, dtype=self._dtype)
        return list(map(Tensor.item, norms))

    def norms_now(self) -> Tensor | None:
        """Return the current gradients' norms, on their device; None without gradients."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return None
        return torch.stack([norm.to(self.device) for norm in self._norms(gradients)]).detach()

    def _norms(self, gradients: list[Tensor]) -> Sequence[Tensor]:
        """Return the norm of each gradient, in one call for all."""
        if gradients[0].requires_grad:  # a backward pass with create_graph
            gradients = [gradient.detach() for gradient in gradients]
        if self.is_plain:
            try:
                return torch._foreach_norm(gradients, dtype=self._dtype)
            except (NotImplementedError, RuntimeError):  # sparse, as later ones will be
                self.is_plain = False
        local = [summed_elements(gradient) for gradient in gradients]
        norms = torch._foreach_norm(local, dtype=self._dtype)
        # The host reads these at once, so they must be complete.
        return [norm.to(self.device, non_blocking=not self._is_on_host) for norm in norms]

    def _read(
        self, norms: list[float], scale: Tensor | None, before_clip: Sequence[BeforeClip]
    ) -> Measured:
        """Combine norms in host memory."""
        factor = 1.0 if scale is None else scale.item()
        total = math.hypot(*norms)
        if not total < math.inf:
            counts = self._counts(before_clip) if before_clip else self._nonfinite(norms)
            return sum(norms), norms, factor, counts
        return total / factor, norms, factor, None

    def _counts(self, before_clip: Sequence[BeforeClip]) -> Counts:
        """Return the counts of nonfinite elements before a clip, which makes NaN of all of them."""
        positions = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        known = zip(positions, before_clip, strict=True)
        return {position: each.nonfinite for position, each in known if each.nonfinite}

    def _nonfinite(self, norms: list[float]) -> Counts:
        return {
            position: count_nonfinite(gradient)
            for position, norm in enumerate(norms)
            if not math.isfinite(norm) and (gradient := self.parameters[position].grad) is not None
        }


def parameter_names(modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, str]:
    """Name the parameters of modules, e.g. "head.weight".

    With several modules each name starts with the class, numbered if two have the same class.
    """
    names: dict[nn.Parameter, str] = {}
    for prefix, module in _prefixed(modules):
        for path, parameter in module.named_parameters():
            names.setdefault(parameter, prefix + _unwrapped(path))
    return names


def module_names(modules: tuple[nn.Module, ...]) -> dict[nn.Module, str]:
    """Name the submodules of modules in the same way; the root has its class name."""
    names: dict[nn.Module, str] = {}
    for prefix, module in _prefixed(modules):
        for path, inner in module.named_modules():
            name = (prefix + _unwrapped(path)).rstrip(".")
            names.setdefault(inner, name or type(inner).__name__)
    return names


def _prefixed(modules: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    inner = [innermost(module) for module in modules]
    classes = [type(module).__name__ for module in inner]
    for index, module in enumerate(inner):
        name = classes[index]
        number = classes[:index].count(name) + 1
        many = f"{name}{number if classes.count(name) > 1 else ''}."
        yield "" if len(modules) == 1 else many, module


def _unwrapped(path: str) -> str:
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile and DistributedDataParallel wrappers."""
    inner = getattr(module, "_orig_mod", module)
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    return module if inner is module else innermost(inner)


def local_elements(gradient: Tensor) -> Tensor:
    """Return the local part of a gradient: a shard, or the uncoalesced values of a sparse one."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local._values() if local.is_sparse else local


def summed_elements(gradient: Tensor) -> Tensor:
    """Return the local part of a gradient, with duplicate rows of a sparse one summed.

    Unlike `coalesce` it does not wait for a GPU: surplus rows at the end are zeros.
    """
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.is_complex() and not local.is_sparse:
        return torch.view_as_real(local.resolve_conj())
    if not local.is_sparse or local.is_coalesced() or not local._nnz():
        return local_elements(gradient)
    indices, values = local._indices(), local._values()
    place = indices[0]
    for size, index in zip(local.shape[1:], indices[1:], strict=False):
        place = place * size + index
    ordered, order = place.sort()
    row = torch.zeros_like(ordered)
    row[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return torch.zeros_like(values).index_add_(0, row, values[order])


def elements(gradient: Tensor) -> Tensor:
    """Return a gradient's elements; for a sparse one the coalesced values.

    On a GPU the host waits for the number of a sparse gradient's rows.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def count_nonfinite(gradient: Tensor) -> tuple[int, int]:
    """Return the numbers of inf and NaN elements. The host waits."""
    values = elements(gradient)
    return int(values.isinf().sum()), int(values.isnan().sum())
