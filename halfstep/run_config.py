"""Configuration of a run: one object with a sub-object per group of settings.

A recipe adds its own fields (`Config`) and may override the shared defaults (`defaults`). Both are
combined into one pydantic model; its JSON Schema is advertised by the worker, rendered as the
browser's form, and used to validate submissions. Does not import torch.
"""

from copy import copy
from functools import lru_cache
from typing import Any, ClassVar, Generic, Protocol, Self

from pydantic import Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import TypeVar

from halfstep import field_errors
from halfstep.config_groups import (
    Checkpoints,
    Data,
    Diagnosis,
    Evaluation,
    Group,
    Modules,
    Precision,
    PrecisionLab,
    RecipeConfig,
    Scaler,
    Spike,
    Training,
    Weights,
)
from halfstep.suggestions import did_you_mean
from halfstep.telemetry.plain_json import JsonObject

#: Default bounds of a recipe's fields: integers that JavaScript represents exactly, numbers within
#: the range of fp32.
BOUNDS = {"integer": 2**53, "number": 2.0**127}

Own = TypeVar("Own", bound=RecipeConfig, default=RecipeConfig)


class RunConfig(Group, Generic[Own]):
    """All settings that determine what a run computes."""

    precision: Precision = Field(
        "fp16",
        title="Precision",
        description="fp16: autocast and loss scaling. bf16: autocast. fp32: neither. fp8: bf16, "
        "and linear layers in fp8, with torchao.",
    )
    training: Training = Field(Training(), title="Training")
    data: Data = Field(Data(), title="Data")
    modules: Modules = Field(Modules(), title="Modules")
    weights: Weights = Field(Weights(), title="Initial weights")
    scaler: Scaler = Field(Scaler(), title="Loss scaler")
    checkpoints: Checkpoints = Field(Checkpoints(), title="Checkpoints")
    evaluation: Evaluation = Field(Evaluation(), title="Evaluation")
    diagnosis: Diagnosis = Field(Diagnosis(), title="Diagnosis")
    spike: Spike = Field(Spike(), title="Loss spikes")
    lab: PrecisionLab = Field(PrecisionLab(), title="Precision lab")
    recipe: Own = Field(title="Recipe")

    @model_validator(mode="after")
    def _a_rollback_needs_checkpoints(self) -> Self:
        if self.spike.rollback and self.checkpoints.every_steps is None:
            raise ValueError("spike.rollback is True, but checkpoints.every_steps is empty: set it")
        return self

    @model_validator(mode="after")
    def _a_diff_compares_half_precision(self) -> Self:
        if self.lab.task == "precision_diff" and self.precision not in ("fp16", "bf16"):
            raise ValueError(
                f"precision is {self.precision}, but lab.task is precision_diff; allowed: fp16, "
                "bf16"
            )
        return self

    @model_validator(mode="after")
    def _weights_in_fp32_are_measured(self) -> Self:
        if self.lab.task != "train" and self.training.weights != "fp32":
            raise ValueError(
                f"training.weights is {self.training.weights}, but lab.task is {self.lab.task}; "
                "allowed: fp32"
            )
        return self

    @model_validator(mode="after")
    def _shards_have_no_fp8(self) -> Self:
        if self.precision == "fp8" and self.training.parallel == "fsdp":
            raise ValueError("precision is fp8, but training.parallel is fsdp; allowed: ddp")
        return self

    @model_validator(mode="after")
    def _a_policy_casts_all_of_a_network(self) -> Self:
        if self.training.shard_casts == "autocast":
            return self
        lacking = {
            "training.parallel ddp": self.training.parallel == "ddp",
            f"precision {self.precision}": self.precision not in ("fp16", "bf16"),
            "training.weights bf16": self.training.weights == "bf16",
            "modules.fp32": bool(self.modules.fp32),
            "modules.bf16": bool(self.modules.bf16),
            "scaler.retry_in_fp32": self.scaler.retry_in_fp32,
        }
        if wrong := [name for name, is_so in lacking.items() if is_so]:
            raise ValueError(
                f"training.shard_casts policy cannot be combined with {' or '.join(wrong)}; "
                "allowed: autocast"
            )
        return self


class ConfigError(ValueError):
    """An invalid configuration; each line has a field, its value and the reason."""


class Configurable(Protocol):
    """Interface of a recipe with regard to its configuration."""

    name: ClassVar[str]
    Config: ClassVar[type[RecipeConfig]]
    defaults: ClassVar[JsonObject]


@lru_cache(maxsize=64)  # creation takes 50 ms
def config_model(recipe: type[Configurable]) -> type[RunConfig]:
    """Return the model of this recipe's configuration, with the recipe's defaults."""
    model = RunConfig[recipe.Config]  # type: ignore[name-defined]
    fields: dict[str, Any] = {}
    for name, info in RunConfig.model_fields.items():
        override = recipe.defaults.get(name)
        if name == "recipe":
            fields[name] = (recipe.Config, _with_default(info, recipe.Config()))
        elif name == "precision":
            fields[name] = (Precision, _with_default(info, override or info.default))
        else:
            group = _group(type(info.default), override or {})
            fields[name] = (group, _with_default(info, group()))
    if unknown := recipe.defaults.keys() - fields.keys():
        raise ConfigError(f"{recipe.name}.defaults names unknown groups: {sorted(unknown)}")
    return create_model("RunConfig", __base__=model, **fields)


@lru_cache(maxsize=64)
def config_schema(recipe: type[Configurable]) -> dict[str, Any]:
    """Return the JSON Schema of this recipe's configuration, with groups inlined, without `$ref`.

    Every number has bounds, by default those of BOUNDS. Repeated calls return the same object.
    """
    schema = config_model(recipe).model_json_schema()
    definitions = schema.pop("$defs")

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            definition = definitions[node["$ref"].removeprefix("#/$defs/")]
            node = definition | {key: value for key, value in node.items() if key != "$ref"}
        return _add_bounds({key: resolve(value) for key, value in node.items()})

    result: JsonObject = resolve(schema)
    return result


def _add_bounds(node: dict[str, object]) -> JsonObject:
    """Add missing bounds to a number's schema."""
    most = BOUNDS.get(str(node.get("type")))
    if most is None or "enum" in node or "const" in node:
        return node
    low = {} if {"minimum", "exclusiveMinimum"} & node.keys() else {"minimum": -most}
    high = {} if {"maximum", "exclusiveMaximum"} & node.keys() else {"maximum": most}
    return node | low | high


def parse_config(recipe: type[Configurable], values: JsonObject) -> RunConfig[Any]:
    """Validate values and fill in defaults. Raises ConfigError with a line per invalid field."""
    try:
        return config_model(recipe).model_validate(values)
    except ValidationError as error:
        errors = {
            ".".join(map(str, e["loc"])): f"{e['input']!r:.200}: {_wrong(recipe, e)}"
            for e in error.errors()
        }
        lines = [
            text if path == field_errors.FURTHER else f"{path} is {text}"
            for path, text in field_errors.bound(errors).items()
        ]
        raise ConfigError("\n".join(lines)) from error


def _wrong(recipe: type[Configurable], error: ErrorDetails) -> str:
    """Return what is wrong with a field; for an unknown field, which ones are allowed."""
    *groups, name = map(str, error["loc"]) if error["loc"] else [""]
    inside = config_schema(recipe)["properties"]
    for group in groups:
        inside = inside.get(group, {}).get("properties", {})
    if error["type"] == "extra_forbidden":
        prefix = "".join(f"{group}." for group in groups)
        paths = [
            f"{group}.{field}"
            for group, rules in config_schema(recipe)["properties"].items()
            for field in rules.get("properties", ())
        ]
        meant = did_you_mean(name, inside, prefix) or did_you_mean(name, paths)
        return f"there is no such field; {meant}allowed: {', '.join(inside)}"
    if error["type"] == "model_type" and name in inside:
        return f"it is a group; allowed: {name}.FIELD, of {', '.join(inside[name]['properties'])}"
    kinds = {option.get("type") for option in inside.get(name, {}).get("anyOf", ())}
    off = ", or off" if "null" in kinds and "string" not in kinds else ""
    return f"{field_errors.reason(error)}{off}"


def _group(group: type[Group], overrides: JsonObject) -> type[Group]:
    if unknown := overrides.keys() - group.model_fields.keys():
        raise ConfigError(f"unknown defaults for {group.__name__}: {sorted(unknown)}")
    fields: dict[str, Any] = {
        name: (info.annotation, _with_default(info, overrides.get(name, info.default)))
        for name, info in group.model_fields.items()
    }
    return create_model(group.__name__, __base__=group, __doc__=group.__doc__, **fields)


def _with_default(info: FieldInfo, default: object) -> FieldInfo:
    changed = copy(info)
    changed.default = default
    return changed
