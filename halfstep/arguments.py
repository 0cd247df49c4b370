"""What a script tells `watch` and its methods; what is wrong is named, with what is allowed."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from halfstep.events import LARGEST_WHOLE, NAME, shown
from halfstep.logged import as_scalar, is_number
from halfstep.run_folder import as_config, runs_folder
from halfstep.saying import in_a_line, say

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

Mode: TypeAlias = Literal["auto", "offline", "disabled"]
MODES = ("auto", "offline", "disabled")
LABEL = f"{NAME.allowed}, and not only blanks"


class BadArgument(ValueError):
    """What a script asked for cannot be done; the message names the value and what is allowed."""


def config(config: object) -> Any:
    """Return a configuration that a script told of as JSON has it."""
    told = as_config(config)
    if told is not None and not isinstance(told, dict):
        allowed = "a dictionary, or what reads as one: a namespace, a dataclass"
        raise BadArgument(f"it is {shown(config)}; allowed: {allowed}")
    return told


def first_config(told: object) -> Any:
    """Return the same of a run that begins; None of what is none, which is said in a line."""
    try:
        return config(told)
    except Exception as error:  # of an object of the script's
        what = "" if isinstance(error, BadArgument) else f"{type(error).__name__}: "
        say(f"config is passed over: {what}{error}")
        return None


def step(step: Any) -> int:
    """Return a step that a script told of."""
    with suppress(TypeError, OverflowError):
        if not isinstance(step, bool) and 0 <= index(step) <= LARGEST_WHOLE:
            return index(step)
    raise BadArgument(f"its step is {shown(step)}; allowed: a whole number from 0")


def loss(loss: Any) -> "Tensor | float":
    """Return a loss that a script told of."""
    is_tensor = hasattr(loss, "detach")
    if is_tensor and not loss.is_complex():
        tensor: Tensor = loss
        return tensor
    with suppress(TypeError, OverflowError):
        if is_number(loss) and not is_tensor:
            return float(as_scalar(loss))
    raise BadArgument(f"it is {shown(loss)}; allowed: a number or a tensor")


def modules(modules: tuple[Any, ...]) -> "tuple[nn.Module, ...]":
    """Return what a script told of as modules."""
    for each in modules:
        if not hasattr(each, "named_parameters"):
            if hasattr(each, "param_groups"):  # whose repr is a page
                kind = type(each).__name__
                raise BadArgument(f"it was told the optimizer {kind}; allowed: optimizers=[…]")
            raise BadArgument(f"it was told {shown(each)}; allowed: modules of torch")
    return modules


def mode(mode: str) -> str:
    """Return how to watch, as the call or the environment says. Raises ValueError."""
    if mode == "auto":
        mode = os.environ.get("HALFSTEP_MODE") or mode
    if mode not in MODES:
        raise ValueError(f"the mode is {mode!r}; allowed: {', '.join(MODES)}")
    return mode


def intervals(histogram: int, layers: int, headroom: int) -> tuple[int, int, int]:
    """Return the steps between looks of three kinds. Raises ValueError."""
    wanted = {"histogram": histogram, "layers": layers, "headroom": headroom}
    for name, every in wanted.items():
        if not isinstance(every, int) or every < 0:
            raise ValueError(f"{name}_every is {every!r}; allowed: a whole number, 0 for never")
    return histogram, layers, headroom


def folder(folder: Any) -> Path:
    """Return where runs lie."""
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder is {in_a_line(folder)}; allowed: a path")
    return Path(folder or runs_folder()).absolute()


def run(run: Any) -> str | None:
    """Return the run to go on with. Which one is meant by a wrong name, nobody can say."""
    if run is None or _is_label(run):
        return cast("str | None", run)
    raise ValueError(f"run is {in_a_line(run)}; allowed: {LABEL}")


def label(argument: str, told: Any) -> str | None:
    """Return a name that the run is given; None of what is none, which is said in a line."""
    if told is None or _is_label(told) or (isinstance(told, str) and not told):
        return cast("str | None", told)
    say(f"{argument} is passed over: it is {in_a_line(told)}; allowed: {LABEL}")
    return None


def tags(tags: Any) -> list[str]:
    """Return those that are texts; a single text is one. The others are said in a line."""
    if isinstance(tags, str):
        tags = [tags]
    if not isinstance(tags, Iterable):
        if tags is not None:
            say(f"tags is passed over: it is {in_a_line(tags)}; allowed: texts, in a list")
        return []
    told = list(tags)
    if wrong := [in_a_line(each) for each in told if not _is_label(each)]:
        say(f"tags: {', '.join(wrong)[:500]} is passed over; allowed: {LABEL}")
    return [each for each in told if _is_label(each)]


def _is_label(told: Any) -> bool:
    return NAME.holds(told) and not told.isspace()


def optimizers(
    told: "Mapping[str, Optimizer] | Sequence[Optimizer] | None",
) -> "Mapping[str, Optimizer] | None":
    """Return by name the only ones to hear; None for all, which is said where some are wrong."""
    if told is None:
        return None
    optimizers: Any = told
    if hasattr(told, "param_groups") or not isinstance(told, Mapping | Sequence):
        optimizers = [told]
    named = optimizers if isinstance(optimizers, Mapping) else _numbered(optimizers)
    named = {name: _innermost(each) for name, each in named.items()}
    wrong = [f"it has {in_a_line(o)}" for o in named.values() if not hasattr(o, "param_groups")]
    wrong += [f"it has the name {in_a_line(name)}" for name in named if not NAME.holds(name)]
    if not named or wrong:
        allowed = "optimizers of torch, in a list or by name"
        what = wrong[0] if wrong else f"it is {in_a_line(optimizers)}"
        say(f"optimizers is passed over, and all are heard: {what}; allowed: {allowed}")
        return None
    return named


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer that makes the steps, of one that Accelerate say has wrapped."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def _numbered(optimizers: "Sequence[Optimizer]") -> "dict[str, Optimizer]":
    kinds = [type(each).__name__ for each in optimizers]
    numbers = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
    names = [kind if n == 1 else f"{kind}{n}" for kind, n in zip(kinds, numbers, strict=True)]
    return dict(zip(names, optimizers, strict=True))


def scaler(scaler: Any) -> "GradScaler | None":
    """Return the only one to hear; None for all, which is said where it is none of torch's."""
    if scaler is None or not find_spec("torch"):
        return None
    from torch.amp.grad_scaler import GradScaler

    if isinstance(scaler, GradScaler):
        return scaler
    what = f"it is {in_a_line(scaler)}; allowed: a torch.amp.GradScaler"
    say(f"scaler is passed over, and every scaler is heard: {what}")
    return None
