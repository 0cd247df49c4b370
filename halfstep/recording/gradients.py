"""Norms of an optimizer's gradients, and counts of their nonfinite elements.

Nothing here waits for a device unless its docstring says so. This module imports torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.recording.reader import Counts

#: Prefixes that module wrappers add to parameter names.
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


GRADIENT = attrgetter("grad")


#: Gradients of one optimizer in one step: L2 norm of each, (P,) 0-dim, 0 if there is none; what the
#: norms still include, the loss scale or 1; and nonfinite elements by position, None if unknown or
#: all are finite. A plain tuple, because each step creates one.
Measured: TypeAlias = tuple[Sequence[Tensor], Tensor, Counts | None]


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
        self.ids = self._groups[0] if len(self._groups) == 1 else []  # of the only group
        self._is_plain = all(
            p.device == self.device and not hasattr(p, "to_local") and not p.is_complex()
            for p in self.parameters
        )
        self.zero = torch.zeros((), dtype=torch.float32, device=self.device)
        self.no_norms = [self.zero] * len(self.names)  # without gradients
        #: Factor of norms that are not taken.
        self.unknown = torch.full((), math.nan, dtype=torch.float32, device=self.device)
        self.clipped: list[int] = []  # ids of the parameters of the last clip
        self._places: list[int] | None = None  # of the own parameters in it; None: not all
        self.is_in_order = False  # the clip's parameters are the own ones, in their order

    def is_current(self) -> bool:
        """Return whether the optimizer's groups still have the same parameters."""
        groups = self.optimizer.param_groups
        return [list(map(id, group["params"])) for group in groups] == self._groups

    def has_groups(self, groups: list[list[int]]) -> bool:
        """Return whether the measured groups are these, by their parameters' ids."""
        return groups == self._groups

    def is_among(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether the first own parameter is among others."""
        first = self.parameters[0] if self.parameters else None
        return any(parameter is first for parameter in parameters)

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

    def norms(self) -> Sequence[Tensor] | None:
        """Return the norm of each gradient, by one operator; None if there are no gradients."""
        try:
            gradients = list(map(GRADIENT, self.parameters))
            if self._is_plain and not gradients[0].requires_grad:
                return torch._foreach_norm(gradients, dtype=self._dtype)
        except (AttributeError, TypeError, NotImplementedError, RuntimeError):
            pass  # some have no gradient, or a sparse one
        present = [g for p in self.parameters if (g := p.grad) is not None]
        if not present:
            return None
        return self.spread(self._norms(present))

    def spread(self, norms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the norms of all parameters from those of parameters with a gradient."""
        if len(norms) == len(self.parameters):
            return norms
        present = iter(norms)
        return [self.zero if p.grad is None else next(present) for p in self.parameters]

    def norms_of_clip(
        self, clipped: Sequence[Tensor], norms: Sequence[Tensor]
    ) -> Sequence[Tensor] | None:
        """Return the norms from those of a clip, None if it did not clip all gradients.

        clipped: its parameters.  norms: of those that have a gradient.
        """
        ids = list(map(id, clipped))
        if ids != self.clipped:
            place = {identity: i for i, identity in enumerate(ids)}
            own = [place.get(id(p), -1) for p in self.parameters]
            self.clipped, self._places = ids, None if -1 in own else own
            self.is_in_order = own == list(range(len(ids)))
        if self._places is None:
            return None
        if len(norms) < len(ids):
            present = iter(norms)
            norms = [self.zero if p.grad is None else next(present) for p in clipped]
        return norms if self.is_in_order else [norms[i] for i in self._places]

    def nonfinite(self, norms: Sequence[Tensor]) -> Counts:
        """Return the counts of nonfinite elements, of gradients whose norms are not finite.

        A gradient that has changed since is left out. The host waits.
        """
        counts: dict[int, tuple[int, int]] = {}
        for position, norm in enumerate(torch.stack(list(norms)).tolist()):
            gradient = self.parameters[position].grad
            if not math.isfinite(norm) and gradient is not None:
                inf, nan = count_nonfinite(gradient)
                if inf or nan or not math.isfinite(self._norms([gradient])[0]):
                    counts[position] = inf, nan
        return counts

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
        if self._is_plain:
            try:
                return torch._foreach_norm(gradients, dtype=self._dtype)
            except (NotImplementedError, RuntimeError):  # sparse, as later ones will be
                self._is_plain = False
        local = [sum_elements(gradient) for gradient in gradients]
        norms = torch._foreach_norm(local, dtype=self._dtype)
        is_far = self.device.type != "cpu"  # where the host reads them, they must be complete
        return [norm.to(self.device, non_blocking=is_far) for norm in norms]


def parameter_names(modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, str]:
    """Name the parameters of modules, e.g. "head.weight".

    With several modules each name starts with the class, numbered if two have the same class.
    """
    names: dict[nn.Parameter, str] = {}
    for prefix, module in _prefix(modules):
        for path, parameter in module.named_parameters():
            names.setdefault(parameter, prefix + _unwrap(path))
    return names


def module_names(modules: tuple[nn.Module, ...]) -> dict[nn.Module, str]:
    """Name the submodules of modules in the same way; the root has its class name."""
    names: dict[nn.Module, str] = {}
    for prefix, module in _prefix(modules):
        for path, inner in module.named_modules():
            name = (prefix + _unwrap(path)).rstrip(".")
            names.setdefault(inner, name or type(inner).__name__)
    return names


def _prefix(modules: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    inner = [innermost(module) for module in modules]
    classes = [type(module).__name__ for module in inner]
    for index, module in enumerate(inner):
        name = classes[index]
        number = classes[:index].count(name) + 1
        many = f"{name}{number if classes.count(name) > 1 else ''}."
        yield "" if len(modules) == 1 else many, module


def _unwrap(path: str) -> str:
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


def sum_elements(gradient: Tensor) -> Tensor:
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


def value_on_host(tensor: Tensor) -> float | None:
    """Return a number without waiting for a device; None if it cannot be read. tensor: 0-dim."""
    if not tensor.is_cpu:
        return None
    try:
        # Unlike item(), no operator; unlike numpy(), it leaves the storage resizable.
        number: Any = tensor.tolist()
    except Exception:  # a subclass, which may have no value
        return None
    return float(number)


def count_nonfinite(gradient: Tensor) -> tuple[int, int]:
    """Return the numbers of inf and NaN elements. The host waits."""
    values = elements(gradient)
    return int(values.isinf().sum()), int(values.isnan().sum())
