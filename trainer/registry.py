"""Registry of recipes: entry points of the group `halfstep.recipes`, and files by path.

HALFSTEP_RECIPES may list further files, separated by commas: `/home/me/gan.py:GAN,…`. Those
registered by `halfstep recipe add` follow.
"""

import importlib.util
import os
import re
import sys
from functools import cache
from importlib.metadata import (
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from pathlib import Path
from types import ModuleType

from halfstep.recipe import Recipe
from trainer import registered_recipes

GROUP = "halfstep.recipes"


class UnknownRecipeError(LookupError):
    """A recipe that is neither registered nor a file; the message lists the known ones."""


class MissingRequirementError(UnknownRecipeError):
    """A recipe whose packages are not installed; the message has the command to install them."""

    def __init__(self, recipe: str, needs: str) -> None:
        """needs: the packages, and the command that installs them."""
        super().__init__(f"recipe {recipe} needs {needs}")
        self.needs = needs


def list_recipes() -> list[str]:
    """Return the references that `load_recipe` accepts here, in addition to other paths.

    Raises NotRegisteredError if the list of registered recipes cannot be read.
    """
    registered = [recipe["reference"] for recipe in registered_recipes.read()]
    return list(dict.fromkeys([*list_configured_recipes(), *registered]))


def list_configured_recipes() -> list[str]:
    """Return the recipes of packages and of the environment."""
    listed = map(str.strip, os.environ.get("HALFSTEP_RECIPES", "").split(","))
    return sorted(find_packaged_recipes().names) + [name for name in listed if name]


def find_packaged_recipes() -> EntryPoints:
    """Return the recipes of installed packages; reading the files of all takes 20 ms, once."""
    return _find_packaged_in(tuple(sys.path))


@cache
def _find_packaged_in(_path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def file_of(reference: str) -> Path | None:
    """Return the file of a reference, or None for the name of an entry point."""
    path = reference if reference.endswith(".py") else reference.rpartition(":")[0]
    return Path(path).resolve() if path.endswith(".py") else None


def load_recipe(reference: str) -> type[Recipe]:
    """Return the recipe class of a registered name or of "path/to/file.py:Class".

    ":Class" may be omitted if the file has one recipe.  Exceptions of the recipe's module at import
    are not caught.  Raises MissingRequirementError, before that, if the extras that its entry point
    names are not installed.
    """
    for point in find_packaged_recipes().select(name=reference):
        check_requirements(point)
        return _check(point.load(), reference)
    if path := file_of(reference):
        if not path.is_file():
            raise UnknownRecipeError(f'"{reference}" cannot be loaded: there is no file {path}')
        attribute = "" if reference.endswith(".py") else reference.rpartition(":")[2]
        return _check(_load_file(path, attribute), reference)
    known = ", ".join(name for name in list_recipes() if name != reference)
    raise UnknownRecipeError(
        f'there is no recipe "{reference}"; allowed: {known}, or path/to/file.py:Class'
    )


def check_requirements(point: EntryPoint) -> None:
    """Raise MissingRequirementError if an extra of an entry point is not installed."""
    if point.dist is None:
        return
    for extra in point.extras:
        of_extra = re.compile(rf"extra == [\"']{extra}[\"']")
        needed = [
            requirement for requirement in point.dist.requires or () if of_extra.search(requirement)
        ]
        names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in needed]
        if missing := [name for name in names if not _is_installed(name)]:
            install = f"pip install '{point.dist.name}[{extra}]'"
            raise MissingRequirementError(point.name, f"{' and '.join(missing)}: {install}")


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _load_file(path: Path, attribute: str) -> object:
    name = f"halfstep_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownRecipeError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their module up by name
    spec.loader.exec_module(module)
    if not attribute:
        return _only_recipe(module, path)
    if not hasattr(module, attribute):
        raise UnknownRecipeError(f'{path} has no class "{attribute}"')
    attribute_value: object = getattr(module, attribute)
    return attribute_value


def _only_recipe(module: ModuleType, path: Path) -> object:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Recipe)
        and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(recipe.__name__ for recipe in own) or "none"
        raise UnknownRecipeError(f"{path} has {len(own)} recipes ({names}): name one, {path}:Class")
    return own[0]


def _check(recipe: object, reference: str) -> type[Recipe]:
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        raise UnknownRecipeError(f"{reference} is not a subclass of halfstep.recipe.Recipe")
    return recipe
