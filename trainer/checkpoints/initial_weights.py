"""Initial weights: a run that starts from weights only, without optimizer, scale or step.

Prefixes of names may differ: a wrapper's "module." or "_orig_mod.", or the "model." of a nested
network, is removed on either side if more names match then.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from halfstep.config_groups import Weights
from halfstep.run_config import ConfigError, RunConfig
from halfstep.telemetry import events
from halfstep.telemetry.events import Event
from trainer.checkpoints.weight_files import read_weights

NAMES_SHOWN = 6  # in a message; the event has up to NAMES_TOLD
NAMES_TOLD = 1000


@dataclass
class Fit:
    """Match between weights and a recipe's modules. Names are the modules', except in
    unexpected.
    """

    count: int  # weights of the modules
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)  # with both shapes, as text

    @property
    def is_whole(self) -> bool:
        """Whether no weight is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def event(self, source: str) -> Event:
        """Return the event of the spool."""
        return events.Weights(
            step=0,
            source=source,
            loaded=len(self.loaded),
            count=self.count,
            missing=self.missing[:NAMES_TOLD],
            unexpected=self.unexpected[:NAMES_TOLD],
            mismatched=self.mismatched[:NAMES_TOLD],
            missing_count=len(self.missing),
            unexpected_count=len(self.unexpected),
            mismatched_count=len(self.mismatched),
        )

    def __str__(self) -> str:
        lists = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.mismatched,
        }
        return "; ".join(f"{word}: {_list_names(names)}" for word, names in lists.items() if names)


def start_from_weights(
    paths: Mapping[str, Path] | None,
    modules: Mapping[str, nn.Module],
    config: RunConfig,
    on_event: Callable[[Event], None],
) -> None:
    """Load the initial weights of the configuration, if any, and report how they fit.

    Raises ConfigError if they do not fit, WeightsError if they cannot be read.
    """
    settings = config.weights
    source = _source(settings)
    if source is None:
        return
    if paths is None:
        if settings.path is None:
            raise ConfigError(
                f"weights are {source}, which only the server can read; use weights.path"
            )
        paths = {"": Path(settings.path)}
    event, trouble = load_weights(paths, modules, source=source, is_strict=settings.strict)
    on_event(event)
    if trouble:
        raise ConfigError(trouble)


def _source(settings: Weights) -> str | None:
    """Describe the initial weights; None if the recipe's own are used."""
    if settings.upload is not None:
        sha256, _, name = settings.upload.partition("/")
        return f"{name}, uploaded, SHA-256 {sha256[:12]}…"
    if settings.run is not None:
        return f"run {settings.run} at step {settings.step}"
    return settings.path


def load_weights(
    paths: Mapping[str, Path], modules: Mapping[str, nn.Module], *, source: str, is_strict: bool
) -> tuple[Event, str]:
    """Load weights into modules; return an event that describes the fit, and a problem.

    The problem is "" if there is none; otherwise no module has changed.  paths: by module, or ""
    for a file with all weights.  Raises WeightsError if a file cannot be read.
    """
    weights: dict[str, Tensor] = {}
    for module, path in paths.items():
        prefix = f"{module}." if module else ""
        weights |= {f"{prefix}{name}": tensor for name, tensor in read_weights(path).items()}
    targets = {
        f"{module}.{name}": tensor
        for module, network in modules.items()
        for name, tensor in network.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    named = _rename(weights, targets)
    fit = _fit(named, targets)
    if not fit.loaded:
        trouble = f"no weight of {source} matches the recipe: it has {_list_names(list(weights))}"
        trouble += f"; the recipe has {_list_names(list(targets))}"
    elif is_strict and not fit.is_whole:
        trouble = f"the weights of {source} do not match: {fit}"
        trouble += "; set weights.strict to off to load those that do"
    else:
        trouble = ""
        _put(named, fit, modules)
    return fit.event(source), trouble


def _fit(weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Fit:
    fit = Fit(len(targets))
    for name, target in targets.items():
        if name not in weights:
            continue
        if mismatch := _mismatch(weights[name], target):
            fit.mismatched.append(f"{name}: {mismatch}")
        else:
            fit.loaded.append(name)
    # A tied weight is often saved under only one of its names.
    places = {_memory_key(targets[name]) for name in fit.loaded}
    absent = [name for name in targets if name not in weights]
    fit.missing = [name for name in absent if _memory_key(targets[name]) not in places]
    fit.unexpected = [name for name in weights if name not in targets]
    return fit


def _mismatch(tensor: Tensor, target: Tensor) -> str:
    """Return why a tensor cannot be loaded into a weight; "" if it can."""
    if tensor.shape != target.shape:
        return f"{_shape(tensor)}, not {_shape(target)}"
    if tensor.is_floating_point() != target.is_floating_point():
        types = (str(value.dtype).removeprefix("torch.") for value in (tensor, target))
        return ", not ".join(types)
    return ""


def _put(weights: Mapping[str, Tensor], fit: Fit, modules: Mapping[str, nn.Module]) -> None:
    loaded = set(fit.loaded)
    for module, network in modules.items():
        own = {name: f"{module}.{name}" for name in network.state_dict()}
        state = {name: weights[whole] for name, whole in own.items() if whole in loaded}
        network.load_state_dict(state, strict=False)


def _rename(weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to the recipe's names by adapting prefixes."""
    best: tuple[int, dict[str, Tensor]] = (0, dict(weights))
    for left_out in _common_prefixes(weights):
        for added in _common_prefixes(targets):
            named = {f"{added}{name[len(left_out) :]}": weight for name, weight in weights.items()}
            fitting = sum(name in targets for name in named)
            if fitting > best[0]:  # on a tie, the smallest change
                best = fitting, named
    return best[1]


def _common_prefixes(names: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield "", and every prefix "a.b." that all names share."""
    yield ""
    if not names:
        return
    parts = [name.split(".")[:-1] for name in names]
    prefix = ""
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            return
        prefix += f"{level[0]}."
        yield prefix


def _memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that tied weights share. (Tensors without elements have no memory.)"""
    return (tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor),)


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"


def _list_names(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
