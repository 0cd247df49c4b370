"""Prints this machine's capabilities as one JSON object: `python -m trainer.probe`.

The worker, which does not import torch, runs it as a short-lived process, and advertises the
result.
"""

import hashlib
import inspect
import os
import re
import sys
from itertools import dropwhile
from pathlib import Path
from traceback import walk_tb
from typing import NoReturn

import torch
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from halfstep.machine_offer import Device, MachineOffer, RecipeOffer, encode_offer
from halfstep.recipe import Recipe
from halfstep.run_config import config_schema
from trainer import machine, registered_recipes
from trainer.diagnosis.source_locations import place
from trainer.registered_recipes import NotRegisteredError
from trainer.registry import (
    MissingRequirementError,
    UnknownRecipeError,
    file_of,
    find_packaged_recipes,
    list_configured_recipes,
    list_recipes,
    load_recipe,
)

NAME = re.compile(r"[\w.-]{1,64}")
IMPORT = "<frozen importlib"  # file name of Python's import machinery in tracebacks
MOST_TITLE, MOST_DESCRIPTION, MOST_ERROR = 200, 2000, 4000


def main() -> NoReturn:
    """Print devices, recipes and versions, and exit."""
    answer = MachineOffer(devices=devices(), recipes=recipes(), versions=machine.versions())
    sys.stdout.write(encode_offer(answer) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes up to a second, in which the worker would wait


def devices() -> list[Device]:
    """Return every CUDA device, or the CPU as one device if there is none."""
    if not torch.cuda.is_available():
        return [
            Device(
                kind="cpu",
                index=0,
                name=machine.device_name(torch.device("cpu")),
                memory_bytes=machine.host_memory_bytes(),
                compute_capability=None,
                fp16=True,  # slow, but with real arithmetic and overflows
                bf16=True,
                tf32=False,
                fp8=False,
            )
        ]
    return [_cuda_device(index) for index in range(torch.cuda.device_count())]


def recipes() -> list[RecipeOffer]:
    """Return every recipe by its declared name, with the schema of its configuration.

    If two recipes declare one name, the later one is named by its reference.
    """
    offers: list[RecipeOffer] = []
    references, problem = list_configured_recipes(), ""
    try:
        references = list_recipes()
    except NotRegisteredError as error:  # an error here must not hide the recipes
        problem = str(error)
    taken = set(references)
    for reference in references:
        entry = offer(reference)
        if entry.name != reference and entry.name in taken:
            entry = replace(entry, name=reference)
        taken.add(entry.name)
        offers.append(entry)
    if problem:
        name = str(registered_recipes.path())
        offers.append(RecipeOffer(name=name, reference=name, error=problem))
    return offers


def offer(reference: str) -> RecipeOffer:
    """Return the description of one recipe, or why it cannot be offered."""
    file = file_of(reference)
    entry = RecipeOffer(
        name=reference,
        reference=reference,
        file=str(file) if file else UNSET,
        package=UNSET if file else _package(reference),
    )
    try:
        recipe = load_recipe(reference)
        source, sha256 = _source(recipe)
        return replace(
            entry,
            name=_check_name(recipe) if file else reference,
            title=str(recipe.title)[:MOST_TITLE],
            description=str(recipe.description)[:MOST_DESCRIPTION],
            schema=config_schema(recipe),
            source=source,
            sha256=sha256,
            check=registered_recipes.check_of(reference) if file else None,
        )
    except MissingRequirementError as error:
        return replace(entry, needs=error.needs)
    except UnknownRecipeError as error:  # its message is for users
        return replace(entry, error=str(error)[:MOST_ERROR], place="")
    except (Exception, SystemExit) as error:  # a user's broken recipe must not hide the others
        text = f"{type(error).__name__}: {error}"[:MOST_ERROR]
        return replace(entry, error=text, place=place_of(file, error))


def place_of(file: Path | None, error: BaseException) -> str:
    """Return the line of a recipe's file that raised, as "mine.py:31"; "" if none ran."""
    name = str(file) if file else _find_imported_file(error)
    if isinstance(error, SyntaxError) and error.filename and name in ("", error.filename):
        return f"{Path(error.filename).name}:{error.lineno}"
    return place(name, error)


def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return Device(
        kind="cuda",
        index=index,
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        fp16=capability >= (5, 3),  # the first with fp16 arithmetic
        bf16=capability >= (8, 0),
        tf32=capability >= (8, 0),
        # See trainer.precision.fp8, which loads torchao.
        fp8=capability >= (8, 9) and machine.versions()["torchao"] is not None,
    )


def _check_name(recipe: type[Recipe]) -> str:
    name = getattr(recipe, "name", None)
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        allowed = "1 to 64 letters, digits, -, _ and ."
        raise ValueError(f"{recipe.__name__}.name is {name!r:.100}; allowed: {allowed}")
    return name


def _find_imported_file(error: BaseException) -> str:
    """Return the file of the module whose import failed; "" if no import was started."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    imported = dropwhile(lambda file: not file.startswith(IMPORT), files)
    return next((file for file in imported if not file.startswith(IMPORT)), "")


def _package(reference: str) -> str:
    for point in find_packaged_recipes().select(name=reference):
        if point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return ""


def _source(recipe: type) -> tuple[str, str] | tuple[UnsetType, UnsetType]:
    """Return a recipe's source file and its SHA-256, if known."""
    try:
        file = Path(inspect.getsourcefile(recipe) or "").resolve()
        return str(file), hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, TypeError):
        return UNSET, UNSET


if __name__ == "__main__":
    main()
