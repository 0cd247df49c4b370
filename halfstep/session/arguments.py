"""Validation of the arguments of `watch` and its methods."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from halfstep.session.config_values import OnLoss, as_config
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.stderr import in_a_line, say
from halfstep.session.step_numbers import BadArgument
from halfstep.telemetry.event_fields import NAME_CHARACTERS
from halfstep.telemetry.plain_json import CLEAN, clean, is_clean, safe_repr
from halfstep.telemetry.run_folder import runs_folder

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

Mode: TypeAlias = Literal["auto", "offline", "disabled"]
MODES = ("auto", "offline", "disabled")
LABEL = f"{CLEAN}, of 1 to {NAME_CHARACTERS} characters, and not only blanks"


def config(value: object, on_loss: OnLoss) -> Any:
    """Convert a configuration to JSON; on_loss: see as_config. Raises BadArgument."""
    read = as_config(value, on_loss)
    if read is not None and not isinstance(read, dict):
        allowed = (
            "a dictionary, or an object that converts to one, such as a namespace or a dataclass"
        )
        raise BadArgument(f"it is {safe_repr(value)}; allowed: {allowed}")
    return read


def first_config(value: object) -> object:
    """Convert a new run's configuration; print a line and return None if it is invalid."""
    try:
        return config(value, say)
    except BadArgument as error:
        say(f"config is ignored: {error}")
        return None


def loss(value: Any) -> "Tensor | float":
    """Return a loss as a tensor or a number. Raises BadArgument."""
    is_tensor = hasattr(value, "detach")
    if is_tensor and not value.is_complex():
        tensor: Tensor = value
        return tensor
    with suppress(TypeError, OverflowError):
        if is_number(value) and not is_tensor:
            return float(as_scalar(value))
    raise BadArgument(f"it is {safe_repr(value)}; allowed: a number or a tensor")


def modules(value: tuple[Any, ...]) -> "tuple[nn.Module, ...]":
    """Check that all arguments are torch modules. Raises BadArgument."""
    for module in value:
        if not hasattr(module, "named_parameters"):
            if hasattr(module, "param_groups"):  # an optimizer's repr is a page long
                kind = type(module).__name__
                raise BadArgument(f"it got the optimizer {kind}; allowed: optimizers=[…]")
            raise BadArgument(f"it got {safe_repr(module)}; allowed: modules of torch")
    return value


def switch(name: str, value: object) -> bool:
    """Return a switch of `watch`, which the variable HALFSTEP_<NAME> can turn off.

    Raises ValueError.
    """
    variable = f"HALFSTEP_{name.upper()}"
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {safe_repr(value)}; allowed: True or False")
    chosen = os.environ.get(variable, "yes").lower()
    if chosen not in ("yes", "no"):
        raise ValueError(f"{variable} is {safe_repr(chosen)}; allowed: yes or no")
    return value and chosen == "yes"


def mode(value: str) -> str:
    """Return the mode of the call, or of HALFSTEP_MODE if it is "auto". Raises ValueError."""
    chosen = os.environ.get("HALFSTEP_MODE") or value if value == "auto" else value
    if chosen not in MODES:
        raise ValueError(f"the mode is {chosen!r}; allowed: {', '.join(MODES)}")
    return chosen


def intervals(
    histogram: int, layers: int | None, headroom: int, norms: int
) -> tuple[int, int | None, int, int]:
    """Check the steps between the kinds of measurements. Raises ValueError."""
    by_name = {"histogram": histogram, "layers": layers, "headroom": headroom, "norms": norms}
    for name, every in by_name.items():
        if name == "layers" and every is None:
            continue
        if not isinstance(every, int) or every < 0:
            raise ValueError(f"{name}_every is {every!r}; allowed: a whole number, 0 for never")
    return histogram, layers, headroom, norms


def folder(value: object) -> Path:
    """Return the absolute path of the folder of runs. Raises ValueError."""
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ValueError(f"folder is {in_a_line(value)}; allowed: a path")
    return Path(value or runs_folder()).absolute()


def run(value: object) -> str | None:
    """Return the run to continue. Raises ValueError: a wrong name is not ignored."""
    if value is None or _is_label(_clean(value)):
        return cast("str | None", _clean(value))
    raise ValueError(f"run is {in_a_line(value)}; allowed: {LABEL}")


def label(argument: str, value: object) -> str | None:
    """Return a label of the run; print a line and return None if it is invalid."""
    if value is None or _is_label(_clean(value)) or (isinstance(value, str) and not value):
        return cast("str | None", _clean(value))
    say(f"{argument} is ignored: it is {in_a_line(value)}; allowed: {LABEL}")
    return None


def tags(value: object) -> list[str]:
    """Return the valid tags, of a list or a single text; print a line about the others."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Iterable):
        if value is not None:
            say(f"tags is ignored: it is {in_a_line(value)}; allowed: texts, in a list")
        return []
    cleaned_tags = [_clean(tag) for tag in value]
    if wrong := [in_a_line(tag) for tag in cleaned_tags if not _is_label(tag)]:
        say(f"tags: {', '.join(wrong)[:500]} is ignored; allowed: {LABEL}")
    return [tag for tag in cleaned_tags if _is_label(tag)]


def _clean(value: object) -> Any:
    """Return a text without characters that cannot be stored; other values unchanged."""
    return clean(value) if isinstance(value, str) else value


def _is_label(value: Any) -> bool:
    return _is_name(value) and not value.isspace()


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= NAME_CHARACTERS and is_clean(value)


def optimizers(
    value: "Mapping[str, Optimizer] | Sequence[Optimizer] | None",
) -> "Mapping[str, Optimizer] | None":
    """Return the optimizers to observe by name; None for all, with a line if one is invalid."""
    if value is None:
        return None
    several: Any = value
    if hasattr(value, "param_groups") or not isinstance(value, Mapping | Sequence):
        several = [value]
    if isinstance(several, Mapping):
        named = {name: _stepping(optimizer) for name, optimizer in several.items()}
    else:
        named = _number([*map(_stepping, several)])
    wrong = [f"it has {in_a_line(o)}" for o in named.values() if not hasattr(o, "param_groups")]
    wrong += [f"it has the name {in_a_line(name)}" for name in named if not _is_name(name)]
    if not named or wrong:
        allowed = "optimizers of torch, in a list or by name"
        what = wrong[0] if wrong else f"it is {in_a_line(several)}"
        say(f"optimizers is ignored and all optimizers are observed: {what}; allowed: {allowed}")
        return None
    return named


def _stepping(optimizer: Any) -> Any:
    """Return the optimizer whose step hooks torch calls: of Accelerate's, the inner one."""
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        return optimizer.optimizer
    return optimizer


def _number(several: "Sequence[Optimizer]") -> "dict[str, Optimizer]":
    kinds = [type(optimizer).__name__ for optimizer in several]
    numbers = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
    names = [kind if n == 1 else f"{kind}{n}" for kind, n in zip(kinds, numbers, strict=True)]
    return dict(zip(names, several, strict=True))


def scaler(value: object) -> "GradScaler | None":
    """Return the scaler to observe; None for all, with a line if it is not torch's."""
    if value is None or not find_spec("torch"):
        return None
    from torch.amp.grad_scaler import GradScaler

    if isinstance(value, GradScaler):
        return value
    what = f"it is {in_a_line(value)}; allowed: a torch.amp.GradScaler"
    say(f"scaler is ignored and all scalers are observed: {what}")
    return None
