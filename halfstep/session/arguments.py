"""What a script tells `watch` and its methods; what is wrong is named, with what is allowed."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from halfstep.session.config_values import OnLoss, as_config
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.stderr import in_a_line, say
from halfstep.telemetry.events import LARGEST_WHOLE, NAME, cleaned, shown
from halfstep.telemetry.run_folder import runs_folder

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

Mode: TypeAlias = Literal["auto", "offline", "disabled"]
MODES = ("auto", "offline", "disabled")
LABEL = f"{NAME.allowed}, and not only blanks"


class BadArgument(ValueError):
    """What a script asked for cannot be done; the message names the value and what is allowed."""


def config(told: object, on_loss: OnLoss) -> Any:
    """Return a configuration as JSON; on_loss: see as_config. Raises BadArgument."""
    read = as_config(told, on_loss)
    if read is not None and not isinstance(read, dict):
        allowed = "a dictionary, or what reads as one: a namespace, a dataclass"
        raise BadArgument(f"it is {shown(told)}; allowed: {allowed}")
    return read


def first_config(told: object) -> Any:
    """Return what a run begins with; None of what is no configuration, which is said in a line."""
    try:
        return config(told, say)
    except BadArgument as error:
        say(f"config is ignored: {error}")
        return None


def step(told: Any) -> int:
    """Return the number of a step. Raises BadArgument."""
    with suppress(TypeError, OverflowError):
        if not isinstance(told, bool) and 0 <= index(told) <= LARGEST_WHOLE:
            return index(told)
    raise BadArgument(f"its step is {shown(told)}; allowed: a whole number from 0")


def loss(told: Any) -> "Tensor | float":
    """Return a loss. Raises BadArgument."""
    is_tensor = hasattr(told, "detach")
    if is_tensor and not told.is_complex():
        tensor: Tensor = told
        return tensor
    with suppress(TypeError, OverflowError):
        if is_number(told) and not is_tensor:
            return float(as_scalar(told))
    raise BadArgument(f"it is {shown(told)}; allowed: a number or a tensor")


def modules(told: tuple[Any, ...]) -> "tuple[nn.Module, ...]":
    """Return modules of torch. Raises BadArgument."""
    for each in told:
        if not hasattr(each, "named_parameters"):
            if hasattr(each, "param_groups"):  # whose repr is a page
                kind = type(each).__name__
                raise BadArgument(f"it was told the optimizer {kind}; allowed: optimizers=[…]")
            raise BadArgument(f"it was told {shown(each)}; allowed: modules of torch")
    return told


def mode(told: str) -> str:
    """Return how to watch, as the call or else the environment says. Raises ValueError."""
    chosen = os.environ.get("HALFSTEP_MODE") or told if told == "auto" else told
    if chosen not in MODES:
        raise ValueError(f"the mode is {chosen!r}; allowed: {', '.join(MODES)}")
    return chosen


def intervals(histogram: int, layers: int, headroom: int) -> tuple[int, int, int]:
    """Return the steps between looks of three kinds. Raises ValueError."""
    wanted = {"histogram": histogram, "layers": layers, "headroom": headroom}
    for name, every in wanted.items():
        if not isinstance(every, int) or every < 0:
            raise ValueError(f"{name}_every is {every!r}; allowed: a whole number, 0 for never")
    return histogram, layers, headroom


def folder(told: Any) -> Path:
    """Return where runs lie. Raises ValueError."""
    if told is not None and not isinstance(told, str | os.PathLike):
        raise ValueError(f"folder is {in_a_line(told)}; allowed: a path")
    return Path(told or runs_folder()).absolute()


def run(told: Any) -> str | None:
    """Return the run to go on with. Raises ValueError: nobody knows what a wrong name means."""
    if told is None or _is_label(_cleaned(told)):
        return cast("str | None", _cleaned(told))
    raise ValueError(f"run is {in_a_line(told)}; allowed: {LABEL}")


def label(argument: str, told: Any) -> str | None:
    """Return a name that the run is given; None of what is none, which is said in a line."""
    if told is None or _is_label(_cleaned(told)) or (isinstance(told, str) and not told):
        return cast("str | None", _cleaned(told))
    say(f"{argument} is ignored: it is {in_a_line(told)}; allowed: {LABEL}")
    return None


def tags(told: Any) -> list[str]:
    """Return those that are texts; a single text is one. The others are said in a line."""
    if isinstance(told, str):
        told = [told]
    if not isinstance(told, Iterable):
        if told is not None:
            say(f"tags is ignored: it is {in_a_line(told)}; allowed: texts, in a list")
        return []
    several = [_cleaned(each) for each in told]
    if wrong := [in_a_line(each) for each in several if not _is_label(each)]:
        say(f"tags: {', '.join(wrong)[:500]} is ignored; allowed: {LABEL}")
    return [each for each in several if _is_label(each)]


def _cleaned(told: Any) -> Any:
    """Return a text as it can be kept; anything else as it is."""
    return cleaned(told) if isinstance(told, str) else told


def _is_label(told: Any) -> bool:
    return NAME.holds(told) and not told.isspace()


def optimizers(
    told: "Mapping[str, Optimizer] | Sequence[Optimizer] | None",
) -> "Mapping[str, Optimizer] | None":
    """Return by name the only ones to hear; None for all, which is said where some are wrong."""
    if told is None:
        return None
    several: Any = told
    if hasattr(told, "param_groups") or not isinstance(told, Mapping | Sequence):
        several = [told]
    if isinstance(several, Mapping):
        named = {name: _stepping(each) for name, each in several.items()}
    else:
        named = _numbered([*map(_stepping, several)])
    wrong = [f"it has {in_a_line(o)}" for o in named.values() if not hasattr(o, "param_groups")]
    wrong += [f"it has the name {in_a_line(name)}" for name in named if not NAME.holds(name)]
    if not named or wrong:
        allowed = "optimizers of torch, in a list or by name"
        what = wrong[0] if wrong else f"it is {in_a_line(several)}"
        say(f"optimizers is ignored, and all are observed: {what}; allowed: {allowed}")
        return None
    return named


def _stepping(optimizer: Any) -> Any:
    """Return the optimizer whose steps torch tells of: of Accelerate's, the one within."""
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        return optimizer.optimizer
    return optimizer


def _numbered(several: "Sequence[Optimizer]") -> "dict[str, Optimizer]":
    kinds = [type(each).__name__ for each in several]
    numbers = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
    names = [kind if n == 1 else f"{kind}{n}" for kind, n in zip(kinds, numbers, strict=True)]
    return dict(zip(names, several, strict=True))


def scaler(told: Any) -> "GradScaler | None":
    """Return the only one to hear; None for all, which is said where it is none of torch's."""
    if told is None or not find_spec("torch"):
        return None
    from torch.amp.grad_scaler import GradScaler

    if isinstance(told, GradScaler):
        return told
    what = f"it is {in_a_line(told)}; allowed: a torch.amp.GradScaler"
    say(f"scaler is ignored, and every scaler is observed: {what}")
    return None
