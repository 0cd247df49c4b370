"""A machine's devices, recipes and versions, as `python -m trainer.probe` prints them.

The worker stores the devices, recipes and versions in its row, where the server reads them. A
recipe that cannot be read costs itself only.
"""

import logging
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from halfstep.telemetry.plain_json import JsonObject, safe_repr
from halfstep.telemetry.validation import explain

logger = logging.getLogger(__name__)


class Offered(Struct, frozen=True, kw_only=True):
    """Base class; fields that are UNSET are left out of the JSON."""


class Device(Offered, frozen=True, kw_only=True):
    """A device that trains."""

    kind: Literal["cpu", "cuda"]
    index: int  # number of the CUDA device, from 0
    name: str
    memory_bytes: int
    compute_capability: str | None  # "8.0"; None for a CPU
    # Whether it computes in these formats, in hardware.
    fp16: bool
    bf16: bool
    tf32: bool
    fp8: bool


class RecipeMemory(Offered, frozen=True, kw_only=True):
    """Device memory that a recipe needs before its first batch, with its defaults."""

    weight_bytes: int  # with buffers
    gradient_bytes: int
    optimizer_bytes: int
    cast_bytes: int  # copies of weights in half precision, with autocast


class RecipeOffer(Offered, frozen=True, kw_only=True):
    """A recipe, or why it cannot be offered."""

    name: str  # declared by the recipe; its reference if that name is taken
    reference: str  # argument of load_recipe; for a file its path
    # Where it comes from: one of the two.
    file: str | UnsetType = UNSET  # path of a registered file
    package: str | UnsetType = UNSET  # name and version of the package that brings it
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    schema: JsonObject | UnsetType = UNSET  # JSON Schema of its configuration; UNSET: not offered
    source: str | UnsetType = UNSET  # path of its source
    sha256: str | UnsetType = UNSET  # of its source
    check: JsonObject | UnsetType | None = UNSET  # of a file: its last `recipe check`
    memory: RecipeMemory | UnsetType = UNSET  # known some time after the worker's start
    needs: str | UnsetType = UNSET  # packages that are missing, and how to install them
    error: str | UnsetType = UNSET  # it cannot be loaded
    place: str | UnsetType = UNSET  # of the error, as "mine.py:31"; "" if unknown

    @property
    def is_offered(self) -> bool:
        """Whether runs of the recipe can be trained."""
        return self.schema is not UNSET


class MachineOffer(Offered, frozen=True, kw_only=True):
    """Devices, recipes and versions of a machine."""

    devices: list[Device] = []  # every CUDA device, or the CPU
    recipes: list[RecipeOffer] = []
    versions: dict[str, str | None] = {}  # of Python, torch, …; None: not installed


class _Answer(Struct, kw_only=True):
    """A printed offer whose recipes are not yet read."""

    devices: list[Device]
    recipes: list[JsonObject]
    versions: dict[str, str | None]


def encode_offer(offer: MachineOffer) -> str:
    """Return an offer as one line of JSON."""
    return msgspec.json.encode(offer).decode()


def read_offer(text: str | bytes) -> MachineOffer:
    """Return an offer; log each recipe that cannot be read. Raises ValueError."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except msgspec.DecodeError as error:
        raise ValueError(f"the machine's offer is damaged: {error}: {safe_repr(text)}") from error
    recipes = []
    for fields in answer.recipes:
        try:
            recipes.append(msgspec.convert(fields, RecipeOffer))
        except msgspec.ValidationError as error:
            name, why = fields.get("name"), explain(error, fields, RecipeOffer)
            logger.error("recipe %s is not offered: %s", safe_repr(name), why)
    return MachineOffer(devices=answer.devices, recipes=recipes, versions=answer.versions)


def rows(offered: list[Device] | list[RecipeOffer]) -> list[JsonObject]:
    """Return devices or recipes as the worker's row stores them."""
    stored: list[JsonObject] = msgspec.to_builtins(offered)
    return stored
