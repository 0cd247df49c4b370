"""Which modules of a recipe a name or a pattern of a setting means: "model.blocks.*.norm".

A name is that of the recipe's module and the path within it, as culprits and replays are told.
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
    """Return the outermost modules that the patterns name; what is in them comes with them.

    field: of the configuration, for the message.  Raises ConfigError for a pattern without any.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = {name: m for name, m in named(modules) if _is_named(name, pattern)}
        if not matches:
            names = [name for name, _ in named(modules)]
            more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
            raise ConfigError(
                f'{field} is "{pattern}", and no module has such a name; allowed: '
                f"{', '.join(names[:NAMES_SHOWN])}{more}"
            )
        for name, module in matches.items():
            those = dict(called(name, module))
            if not those:
                kind = type(module).__name__
                raise ConfigError(
                    f"{field} names {name}, a {kind}: it holds nothing that is called"
                )
            found |= those
    once = {id(module): name for name, module in reversed(found.items())}  # tied: its first name
    names_found = set(once.values())
    return {
        name: module
        for name, module in found.items()
        if name in names_found and not any(above in names_found for above in _above(name))
    }


def named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its name; one that is there twice, by both."""
    for name, network in modules.items():
        for path, module in network.named_modules(remove_duplicate=False):
            yield f"{name}.{path}".rstrip("."), module


def _is_named(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module; of a list of modules, which nobody calls, those in it."""
    forward: Any = type(module).forward
    if forward is not nn.Module.forward or "forward" in vars(module):
        yield name, module
        return
    for path, child in module.named_children():
        yield from called(f"{name}.{path}", child)


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
