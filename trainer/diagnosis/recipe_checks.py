"""Additional recipe checks, each with its own recipe instance on the CPU.

Only `check` uses them.
"""

import inspect
import math
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.cpp_extension import TORCH_LIB_PATH
from torch.utils.data import IterableDataset

from halfstep.config_groups import Precision
from halfstep.recipe import Loss, Recipe
from halfstep.run_config import RunConfig, parse_config
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.spool import Steps
from trainer.checkpoints import checkpoint
from trainer.data.batches import fingerprint
from trainer.data.sources import drawn
from trainer.diagnosis.op_recorder import Finding
from trainer.diagnosis.source_locations import first_line, place
from trainer.loop import train
from trainer.repeatability import seed_everything
from trainer.setup import make_recipe, prepare_run
from trainer.several_losses import as_losses
from trainer.step import make_autocast, make_scaler

STEPS = 5
BATCH_SIZE = 8  # at most, unless set: fp16 is slow on a CPU
RESUMED, RESUMED_AT = 4, 2  # steps
#: Parts of a checkpoint that reveal a different resumed run, in order of precedence.
DECIDING = ("modules", "optimizers", "recipe_state", "scaler", "random", "next_batch")
#: Operations without meta kernel, because the shape of their result depends on values.
SHAPED_BY_VALUES = ("unique", "bincount", "nonzero", "masked_select")
CPU, META = torch.device("cpu"), torch.device("meta")


def small_config(
    recipe_class: type[Recipe], values: JsonObject, precision: Precision, **training: object
) -> RunConfig:
    """Return a run's configuration with small batches and few steps. Raises ConfigError."""
    given = values.get("training", {})
    default = parse_config(recipe_class, {}).training.batch_size
    size = {"batch_size": min(BATCH_SIZE, default)} | given
    return parse_config(
        recipe_class,
        values
        | {
            "precision": precision,
            "training": size | {"steps": STEPS, "accumulation_steps": 1} | training,
            "evaluation": {"every_steps": None},
            "data": values.get("data", {}) | {"workers": 0},
        },
    )


def check_loss(recipe_class: type[Recipe], values: JsonObject) -> Iterator[Finding]:
    """Check that losses are means over the batch, not divided by accumulation_steps."""
    config = small_config(recipe_class, values, "fp32")
    count = config.training.batch_size // 2 or 1
    once = _losses(recipe_class, config, count, 1)
    accumulating = small_config(recipe_class, values, "fp32", accumulation_steps=4)
    for optimizer, value in once.items():
        repeated = [_losses(recipe_class, config, count, n).get(optimizer, 0.0) for n in (2, 4)]
        if value and all(
            math.isclose(r, value * n, rel_tol=0.1) for r, n in zip(repeated, (2, 4), strict=True)
        ):
            yield Finding(
                "error",
                f"the loss of {optimizer} doubles with the batch size, so it is a sum. Yield the "
                "mean: otherwise the gradient grows with the batch, and accumulation changes the "
                "result",
            )
        divided = _losses(recipe_class, accumulating, count, 1).get(optimizer, 0.0)
        if value and math.isclose(divided, value / 4, rel_tol=0.05):
            yield Finding(
                "error",
                f"the loss of {optimizer} is divided by training.accumulation_steps, which the "
                "loop does; yield the mean over the batch",
            )


def _losses(
    recipe_class: type[Recipe], config: RunConfig, count: int, times: int
) -> dict[str, float]:
    """Return the losses of a batch that repeats `count` examples `times` times."""
    seed_everything(0)
    recipe = make_recipe(recipe_class, config, CPU)
    recipe.scaler = make_scaler(config, CPU)
    for module in recipe.modules.values():
        module.eval()  # no dropout: only the batch may differ
    batch = drawn(recipe, torch.arange(count).repeat(times), CPU)
    seed_everything(0)
    return {
        optimizers_of(loss): loss.value.item()
        for yielded in recipe.training_step(batch)
        for loss in as_losses(yielded)
    }


def optimizers_of(loss: Loss) -> str:
    """Return the quoted names of a loss's optimizers, joined for a message."""
    return " and ".join(f'"{name}"' for name in loss.optimizers)


def check_compiler(recipe_class: type[Recipe], values: JsonObject) -> Iterator[Finding]:
    """Check that torch.compile works on this machine, if it is enabled."""
    if not small_config(recipe_class, values, "fp32").training.compile:
        return
    for path in (TORCH_LIB_PATH, sysconfig.get_config_var("LIBDIR") or ""):
        if " " in path:
            yield Finding(
                "error",
                f"torch.compile cannot build here: it passes -L{path} to the linker unquoted, and "
                "the path has a space. Install torch in a path without spaces, or set "
                "training.compile to False",
            )


def check_batch(recipe_class: type[Recipe], values: JsonObject) -> Iterator[Finding]:
    """Check that the indices determine the batch, as a resumed run requires."""
    config = small_config(recipe_class, values, "fp32")
    seed_everything(0)
    recipe = make_recipe(recipe_class, config, CPU)
    if isinstance(recipe.dataset, IterableDataset):
        return  # its state determines the next batch, which the check of a resume covers
    source = "batch()" if recipe.dataset is None else type(recipe.dataset).__name__
    state = deepcopy(recipe.state_dict())
    indices = torch.arange(config.training.batch_size)

    def again(indices: Tensor) -> Any:
        if state:
            recipe.load_state_dict(deepcopy(state))
        seed_everything(0)
        return drawn(recipe, indices, CPU)

    batch = again(indices)
    first = fingerprint(batch)
    # The fingerprint of an object of another type is not conclusive.
    is_seen = any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch))
    if fingerprint(again(indices)) != first:
        yield Finding(
            "error",
            f"{source} returns other examples for the same indices: it has an order of its own, "
            "and a resumed run would continue with others. Follow indices, or keep the place in "
            "state_dict()",
        )
        return
    others = recipe.train_size - 1 - indices
    if is_seen and not state and recipe.train_size > 1 and fingerprint(again(others)) == first:
        yield Finding(
            "warning",
            f"{source} ignores its indices: it returns the same examples for others, so an epoch "
            "need not see them all",
        )


def check_resume(recipe_class: type[Recipe], values: JsonObject) -> Iterator[Finding]:
    """Check that a run with a resume in between gives bit-identical results."""
    # At a scale of 1 steps are applied: skipped ones would make every resume exact.
    scaler = values.get("scaler", {}) | {"init_scale": 1.0}
    changed = {"checkpoints": {"every_steps": RESUMED_AT}, "scaler": scaler}
    config = small_config(recipe_class, values | changed, "fp16", steps=RESUMED)
    records: list[Steps] = []
    with TemporaryDirectory(prefix="halfstep-check-") as folder:
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        resumed.mkdir()

        def run(into: Path, resume: Path | None = None) -> Mapping[str, str]:
            train(
                prepare_run(
                    recipe_class,
                    config,
                    device=CPU,
                    on_steps=records.append,
                    on_event=lambda _: None,
                    checkpoint_folder=into,
                    resume=resume,
                )
            )
            return dict(_fingerprints(checkpoint.load(into / f"step-{RESUMED:08d}.pt")))

        try:
            expected = run(whole)
            middle = f"step-{RESUMED_AT:08d}.pt"
            actual = run(resumed, (whole / middle).rename(resumed / middle))
        except (Exception, SystemExit) as error:
            yield Finding("error", f"it cannot be resumed: {first_line(error)}")
            return
    if other := [name for name in expected if actual.get(name) != expected[name]]:
        named = ", ".join([*other[:3], *(["…"] if len(other) > 3 else [])])
        yield Finding(
            "error",
            f"{RESUMED} steps in a row, and {RESUMED_AT}, a resume and {RESUMED - RESUMED_AT} "
            f"more, differ in {named}: what decides a step besides modules, optimizers and the "
            "global random generators belongs in state_dict()",
        )
    elif not any((record["flags"] & SKIPPED == 0).any() for record in records):
        yield Finding(
            "warning",
            f"resuming was not checked: all {RESUMED} steps were skipped at a loss scale of 1",
        )


def _fingerprints(state: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and fingerprint of each value of a checkpoint that determines a step."""
    if not place:
        state = {name: state[name] for name in DECIDING}
    if not isinstance(state, Mapping | list | tuple):
        yield place, fingerprint(state)
        return
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from _fingerprints(value, f"{place}.{key}" if place else str(key))


def check_device(recipe_class: type[Recipe], values: JsonObject) -> Iterator[Finding]:
    """Check for synchronisation with the device, on the meta device, which has no values."""
    # Unfused, because the meta device has no fused kernels; no optimizer steps here.
    config = small_config(recipe_class, values, "fp16", fused=False)
    file = inspect.getfile(recipe_class)
    with _autocast_takes_meta():
        try:
            recipe = make_recipe(recipe_class, config, META)
        except Exception as error:
            yield Finding(
                "warning",
                f"device synchronizations were not checked: the recipe cannot be created on "
                f"torch's meta device ({first_line(error)})",
                place(file, error),
            )
            return
        # Its tensors are created on the device of the losses.
        recipe.scaler = make_scaler(config, CPU)
        if left := [name for name, module in recipe.modules.items() if not _is_on(META, module)]:
            for name in left:
                yield Finding("error", f'module "{name}" is on the CPU: move it with .to(device)')
            return
        try:
            indices = torch.arange(config.training.batch_size)
            batch = drawn(recipe, indices, META)
            losses = recipe.training_step(batch)
            while True:
                with make_autocast(config, CPU):
                    loss = next(losses, None)
                if loss is None:
                    return
                total = torch.stack([part.value for part in as_losses(loss)]).sum()
                recipe.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            yield _finding_of_meta_error(error, file)


def _finding_of_meta_error(error: Exception, file: str) -> Finding:
    """Interpret an error raised by a step on the meta device."""
    text, where = first_line(error), place(file, error)
    if "Tensor on device cpu is not on the expected device meta" in text:
        return Finding(
            "error",
            "a tensor or a module of the step is on the CPU: create it on the device that __init__ "
            "receives, or move it with .to(device)",
            where,
        )
    if "Meta kernel" in text and not any(name in text for name in SHAPED_BY_VALUES):
        operation = str(error).removeprefix("aten::").partition(":")[0].partition(".")[0]
        return Finding(
            "warning",
            f"device synchronizations were checked only up to this line: torch has no "
            f"{operation.strip('_')} on its meta device",
            where,
        )
    return Finding(
        "error",
        f"the step reads a value from the device, which makes the host wait: keep the value on the "
        f"device, or read it in evaluate ({text})",
        where,
    )


def _is_on(device: torch.device, module: nn.Module) -> bool:
    return all(parameter.device == device for parameter in module.parameters())


@contextmanager
def _autocast_takes_meta() -> Iterator[None]:
    """Make autocast regions for the meta device open as regions for the CPU."""
    original = torch.autocast.__init__

    def initialize(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
