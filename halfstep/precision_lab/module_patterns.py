"""Names of modules as patterns, as modules.fp32 of a run's configuration takes them.

This module imports torch.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Self

from torch import nn

from halfstep.precision_lab.suggestions import LOSS


class ModuleTree:
    """Names of modules in the order of the model, their types, and what is inside of each."""

    def __init__(self, types: Mapping[str, str], inside: Mapping[str, frozenset[str]]) -> None:
        """inside: of each name, with the module itself."""
        self.types, self.inside = types, inside

    @classmethod
    def of(cls, names: Mapping[nn.Module, str]) -> Self:
        """Return the tree of named modules, with the loss function outside of it."""
        inside = {
            name: frozenset(names[inner] for inner in module.modules() if inner in names)
            for module, name in names.items()
        }
        types = {name: type(module).__name__ for module, name in names.items()}
        return cls(types, inside | {LOSS: frozenset([LOSS])})

    def cover(self, names: Iterable[str]) -> frozenset[str]:
        """Return modules with all that is in them."""
        return frozenset().union(*(self.inside[name] for name in names))

    def outermost(self, names: Collection[str]) -> list[str]:
        """Return the modules that are in no other one of these, in order."""
        return [
            name
            for name in self.types
            if name in names
            and not any(name in self.inside[other] for other in names if other != name)
        ]

    def groups(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """Return modules in groups of equal type and role: blocks.0.norm with blocks.1.norm."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name in self.types:
            if name in names:
                groups.setdefault((self.types[name], wildcard(name)), []).append(name)
        return [tuple(group) for group in groups.values()]

    def patterns(self, names: Collection[str]) -> list[str]:
        """Return the fewest patterns that match modules and nothing that is not in them."""
        covered, patterns = self.cover(names), list[str]()
        for group in self.groups(self.outermost(names)):
            pattern = wildcard(group[0])
            is_exact = covered.issuperset(n for n in self.types if fnmatchcase(n, pattern))
            patterns += [pattern] if len(group) > 1 and is_exact else list(group)
        return list(dict.fromkeys(patterns))


def wildcard(name: str) -> str:
    """Return a name with * for each number: blocks.*.norm."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
