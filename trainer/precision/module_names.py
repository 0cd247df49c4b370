"""Selects a recipe's modules by names or patterns in settings: "model.blocks.*.norm".

A name is the name of the recipe's module and the path within it, as in culprits and replays.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from halfstep.run_config import ConfigError

NAMES_SHOWN = 12


def chosen(
    modules: Mapping[str, nn.Module], field: str, patterns: Sequence[str]
) -> dict[str, nn.Module]:
    """Return the outermost modules that match the patterns; submodules are implied.

    field: of the configuration, for messages.  Raises ConfigError for a pattern without a match.
    """
    result: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = {name: m for name, m in named(modules) if _is_named(name, pattern)}
        if not matches:
            names = [name for name, _ in named(modules)]
            more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
            raise ConfigError(
                f'{field}: no module is named "{pattern}"; modules: '
                f"{', '.join(names[:NAMES_SHOWN])}{more}"
            )
        for name, module in matches.items():
            callable_modules = dict(find_called_modules(name, module))
            if not callable_modules:
                kind = type(module).__name__
                raise ConfigError(
                    f"{field} names {name}, a {kind}: it contains no module with a forward method"
                )
            result |= callable_modules
    once = {id(module): name for name, module in reversed(result.items())}  # tied: first name
    selected = set(once.values())
    return {
        name: module
        for name, module in result.items()
        if name in selected and not any(above in selected for above in _above(name))
    }


def named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its name; a shared one with each of its names."""
    for name, network in modules.items():
        for path, module in network.named_modules(remove_duplicate=False):
            yield f"{name}.{path}".rstrip("."), module


def _is_named(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def find_called_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module, or for a container without forward the modules in it."""
    forward: Any = type(module).forward
    if forward is not nn.Module.forward or "forward" in vars(module):
        yield name, module
        return
    for path, child in module.named_children():
        yield from find_called_modules(f"{name}.{path}", child)


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
