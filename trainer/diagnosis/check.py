"""Try a recipe before it trains for hours: `python -m trainer.diagnosis.check mine.py`.

It runs five steps of the real loop in each precision on the CPU, with CUDA's autocast, then a step
on the meta device, whose tensors have no values, so that whatever would make the host wait raises,
and compares four steps with two, a resume and two more. What is wrong is said in words, with the
line. Exit code 1 if there is an error; warnings are for judgement.
"""

import argparse
import inspect
import math
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.config import ConfigError, Precision, RunConfig, parse_config
from halfstep.recipe import Loss, Recipe, RecipeError
from halfstep.spool import SKIPPED, STEP_DTYPE, Event, Steps
from trainer import checkpoint
from trainer.batches import fingerprint
from trainer.console import nested
from trainer.diagnosis.cuda_autocast import cudas_autocast
from trainer.diagnosis.witness import HALF, Finding, Witness
from trainer.registry import UnknownRecipeError, load_recipe
from trainer.train import as_losses, make_autocast, make_scaler, seed_everything, train

STEPS = 5
BATCH_SIZE = 8  # at most, unless it is set: fp16 is slow on a CPU
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
RESUMED, RESUMED_AT = 4, 2  # steps
#: Of a checkpoint: what shows, in this order, that a resumed run is another one.
DECIDING = ("modules", "optimizers", "recipe_state", "scaler", "random", "next_batch")
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass
class Report:
    """What came out: the steps in each precision, and each finding with its precisions."""

    steps: dict[str, Steps] = field(default_factory=dict)
    findings: dict[Finding, list[str]] = field(default_factory=dict)

    def add(self, finding: Finding, precision: str | None = None) -> None:
        """Keep a finding; the same one in several precisions is one."""
        precisions = self.findings.setdefault(finding, [])
        if precision:
            precisions.append(precision)

    @property
    def errors(self) -> list[Finding]:
        """The findings that are mistakes for certain."""
        return [finding for finding in self.findings if finding.severity == "error"]


def main(arguments: list[str] | None = None) -> None:
    """Check one recipe and print what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m trainer.diagnosis.check", description=__doc__)
    parser.add_argument("recipe", help="path/to/file.py, path/to/file.py:Class, or a known name")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(options.recipe)
        report = check(recipe, nested(options.set))
    except (ConfigError, UnknownRecipeError) as error:
        parser.exit(2, f"error: {error}\n")
    sys.stdout.write("\n".join(_lines(recipe, report)) + "\n")
    if report.errors:
        sys.exit(1)


def check(recipe_class: type[Recipe], values: dict[str, Any]) -> Report:
    """Return what five steps in each precision, and some questions besides, say of a recipe.

    values: settings, as a run has them.  Raises ConfigError for those.
    """
    with cudas_autocast():
        return _check(recipe_class, values)


def _check(recipe_class: type[Recipe], values: dict[str, Any]) -> Report:
    report = Report()
    configs = {precision: _config(recipe_class, values, precision) for precision in PRECISIONS}
    zeros_in_fp32: set[str] = set()
    for precision, config in configs.items():
        witness = Witness(precision, "cpu", inspect.getfile(recipe_class), zeros_in_fp32)
        report.steps[precision] = _train(recipe_class, config, witness)
        if precision == "fp32":
            zeros_in_fp32 = witness.zeros
        for finding in witness.findings:
            report.add(finding, precision)
    for finding in _compare(report.steps, configs["fp16"].scaler.init_scale):
        report.add(finding)
    for question in (_asked_of_the_loss, _asked_of_the_batch, _waits, _asked_of_a_resume):
        if report.errors:  # of a recipe that does not run there is no more to ask
            break
        for finding in question(recipe_class, values):
            report.add(finding)
    return report


def _config(
    recipe_class: type[Recipe], values: dict[str, Any], precision: Precision, **training: Any
) -> RunConfig[Any]:
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
        },
    )


def _train(recipe_class: type[Recipe], config: RunConfig[Any], witness: Witness) -> Steps:
    """Run the real loop with a witness; return the records of its steps."""
    records: list[Steps] = [np.zeros(0, STEP_DTYPE)]
    try:
        train(
            _observed(recipe_class, witness),
            config,
            device=CPU,
            on_steps=records.append,
            on_event=lambda event: _see_shapes(event, witness),
        )
        witness.summarise()
    except ConfigError:
        raise
    except RecipeError as error:
        witness.found("error", str(error))
    except (Exception, SystemExit) as error:  # whatever a recipe raises is a finding
        witness.found("error", _first_line(error), _place_of(error, witness.file))
    return np.concatenate(records)


def _observed(recipe_class: type[Recipe], witness: Witness) -> type[Recipe]:
    """Return the recipe with a witness in each of its methods that the loop calls."""

    class Observed(recipe_class):  # type: ignore[misc, valid-type]
        name = recipe_class.name

        def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
            super().__init__(config, device)
            _see_optimizers(self, config, witness)
            self._without_gradient: dict[str, set[str]] = {}

        def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
            witness.in_batch = True
            with witness:
                batch = super().batch(indices, generator)
            witness.in_batch = False
            return batch

        def training_step(self, batch: Any) -> Iterator[Loss | tuple[Loss, ...]]:
            losses = iter(super().training_step(batch))
            before: list[tuple[int, int]] | None = _weights_state(self)
            while True:
                with witness:
                    loss = next(losses, None)
                if before is not None and _weights_state(self) != before:
                    witness.found(
                        "error",
                        "training_step changes weights or gradients itself: backward() and "
                        "optimizer.step() are the loop's; yield the loss",
                    )
                before = None  # from here on the loop has stepped, too
                if loss is None:
                    return
                for each in as_losses(loss):
                    if each.value.dtype in HALF:
                        witness.found(
                            "error",
                            f"the loss of {_optimizers(each)} is {each.value.dtype}: it was "
                            "computed outside autocast's list of loss functions; take .float() of "
                            "what goes in",
                        )
                yield loss
                for each in as_losses(loss):
                    for optimizer in each.optimizers:
                        self._see_gradients(optimizer)

        def evaluate(self) -> dict[str, float]:
            metrics: dict[str, float] = super().evaluate()
            _see_metrics(metrics, witness)
            for optimizer, names in self._without_gradient.items():
                for name in sorted(names):
                    witness.found(
                        "warning",
                        f'parameter {name} of "{optimizer}" got no gradient in any step: it is '
                        "not used, or is detached",
                    )
            return metrics

        def _see_gradients(self, optimizer: str) -> None:
            own = {p for g in self.optimizers[optimizer].param_groups for p in g["params"]}
            missing = {
                f"{module}.{name}"
                for module, network in self.modules.items()
                for name, parameter in network.named_parameters()
                if parameter in own and parameter.grad is None
            }
            self._without_gradient.setdefault(optimizer, missing).intersection_update(missing)

    return Observed


def _weights_state(recipe: Recipe) -> list[tuple[int, int]]:
    """Return a version of each weight and of its gradient; any change in place changes them."""
    return [
        (p._version, -1 if p.grad is None else p.grad._version)
        for module in recipe.modules.values()
        for p in module.parameters()
    ]


def _see_optimizers(recipe: Recipe, config: RunConfig[Any], witness: Witness) -> None:
    trained = {
        p for each in recipe.optimizers.values() for g in each.param_groups for p in g["params"]
    }
    for module, network in recipe.modules.items():
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and parameter not in trained:
                witness.found("warning", f"parameter {module}.{name} is in no optimizer")
        if any(isinstance(each, nn.DataParallel) for each in network.modules()):
            witness.found(
                "warning",
                f'module "{module}" is a DataParallel: its threads take over whether autocast is '
                "on, but not its type. Give a run several devices instead: one process each",
            )
    for name, optimizer in recipe.optimizers.items():
        if config.training.fused and not optimizer.defaults.get("fused"):
            witness.found(
                "warning",
                f'optimizer "{name}" is not fused: PyTorch\'s scaler makes the host wait for the '
                "device once a step. Pass fused=config.training.fused",
            )


def _see_metrics(metrics: Any, witness: Witness) -> None:
    if not metrics:
        witness.found(
            "warning", "evaluate returns no metrics: a run's page will show its training loss only"
        )
        return
    for name, value in metrics.items():
        if not isinstance(value, float | int):
            kind = type(value).__name__
            witness.found("error", f'evaluate returns {kind} as "{name}": return a float, .item()')
        elif not math.isfinite(value):
            witness.found("warning", f'evaluate returns {value} as "{name}" after {STEPS} steps')


def _see_shapes(event: Event, witness: Witness) -> None:
    if event["event"] == "shapes":
        witness.found(
            "warning",
            f"sizes that miss tensor cores, which want multiples of 8: {', '.join(event['layers'])}"
            + (", …" if event["count"] > len(event["layers"]) else ""),
        )


def _compare(steps: dict[str, Steps], init_scale: float) -> Iterator[Finding]:
    """Say how fp16 differs from fp32 in a way that is no rounding."""
    plain, half = steps["fp32"]["loss"], steps["fp16"]["loss"]
    for number, (expected, loss) in enumerate(zip(plain, half, strict=False), 1):
        if math.isfinite(expected) and not math.isfinite(loss):
            yield Finding(
                "error",
                f"the loss is {loss} at step {number} in fp16, {expected:.3g} in fp32: a value of "
                "the forward pass exceeds 65,504, or fp16 has flushed one to 0",
            )
            return
    if len(plain) and len(half) and init_scale > 2 and math.isclose(
        half[0], plain[0] * init_scale, rel_tol=0.05
    ):  # fmt: skip
        yield Finding("error", "training_step scales the loss: the loop does; yield the plain loss")


def _asked_of_the_loss(recipe_class: type[Recipe], values: dict[str, Any]) -> Iterator[Finding]:
    """Ask whether the losses are means: over the batch, and not over accumulated batches."""
    config = _config(recipe_class, values, "fp32")
    count = config.training.batch_size // 2 or 1
    once = _losses(recipe_class, config, count, 1)
    accumulating = _config(recipe_class, values, "fp32", accumulation_steps=4)
    for optimizer, value in once.items():
        repeated = [_losses(recipe_class, config, count, n).get(optimizer, 0.0) for n in (2, 4)]
        if all(
            math.isclose(r, value * n, rel_tol=0.1) for r, n in zip(repeated, (2, 4), strict=True)
        ):
            yield Finding(
                "error",
                f"the loss of {optimizer} doubles with the batch: it is a sum. Yield a mean, or "
                "the gradient grows with the batch, and accumulation changes what is learnt",
            )
        divided = _losses(recipe_class, accumulating, count, 1).get(optimizer, 0.0)
        if value and math.isclose(divided, value / 4, rel_tol=0.05):
            yield Finding(
                "error",
                f"the loss of {optimizer} is divided by training.accumulation_steps: the loop "
                "does that; yield the mean over the batch",
            )


def _losses(
    recipe_class: type[Recipe], config: RunConfig[Any], count: int, times: int
) -> dict[str, float]:
    """Return the losses of a batch in which each of `count` examples comes so many times."""
    seed_everything(0)
    recipe = recipe_class(config, CPU)
    recipe.scaler = make_scaler(config, CPU)
    for module in recipe.modules.values():
        module.eval()  # no dropout: only the batch shall differ
    generator = torch.Generator().manual_seed(0)
    batch = recipe.batch(torch.arange(count).repeat(times), generator)
    seed_everything(0)
    return {
        _optimizers(loss): loss.value.item()
        for yielded in recipe.training_step(batch)
        for loss in as_losses(yielded)
    }


def _optimizers(loss: Loss) -> str:
    return " and ".join(f'"{name}"' for name in loss.optimizers)


def _asked_of_the_batch(recipe_class: type[Recipe], values: dict[str, Any]) -> Iterator[Finding]:
    """Ask whether the indices decide what comes next, as a resumed run takes for granted."""
    config = _config(recipe_class, values, "fp32")
    seed_everything(0)
    recipe = recipe_class(config, CPU)
    state = deepcopy(recipe.state_dict())
    indices = torch.arange(config.training.batch_size)

    def drawn(indices: Tensor) -> str:
        if state:
            recipe.load_state_dict(deepcopy(state))
        seed_everything(0)
        return fingerprint(recipe.batch(indices, torch.Generator().manual_seed(0)))

    first = drawn(indices)
    if drawn(indices) != first:
        yield Finding(
            "error",
            "batch() returns other examples for the same indices: it has an order of its own, and "
            "a resumed run would go on with others. Follow indices, or keep the place in "
            "state_dict()",
        )
    elif recipe.train_size > 1 and drawn(recipe.train_size - 1 - indices) == first and not state:
        yield Finding(
            "warning",
            "batch() ignores its indices: it returns the same examples for others, so an epoch "
            "need not see them all",
        )


def _asked_of_a_resume(recipe_class: type[Recipe], values: dict[str, Any]) -> Iterator[Finding]:
    """Ask whether steps in a row, and the same with a resume among them, lead to the same bits."""
    config = _config(
        recipe_class, values | {"checkpoints": {"every_steps": RESUMED_AT}}, "fp16", steps=RESUMED
    )
    with TemporaryDirectory(prefix="halfstep-check-") as folder:
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        resumed.mkdir()

        def run(into: Path, resume: Path | None = None) -> Mapping[str, str]:
            train(
                recipe_class,
                config,
                device=CPU,
                on_steps=_ignore,
                on_event=_ignore,
                checkpoint_folder=into,
                resume=resume,
            )
            return dict(_fingerprints(checkpoint.load(into / f"step-{RESUMED:08d}.pt")))

        try:
            expected = run(whole)
            middle = f"step-{RESUMED_AT:08d}.pt"
            found = run(resumed, (whole / middle).rename(resumed / middle))
        except (Exception, SystemExit) as error:
            yield Finding("error", f"it cannot be resumed: {_first_line(error)}")
            return
    if other := [name for name in expected if found.get(name) != expected[name]]:
        named = ", ".join([*other[:3], *(["…"] if len(other) > 3 else [])])
        yield Finding(
            "error",
            f"{RESUMED} steps in a row, and {RESUMED_AT}, a resume and {RESUMED - RESUMED_AT} "
            f"more, differ in {named}: what decides a step besides modules, optimizers and the "
            "global random generators belongs in state_dict()",
        )


def _fingerprints(state: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of a checkpoint that decides a step, by its place, and its fingerprint."""
    if not place:
        state = {name: state[name] for name in DECIDING}
    if not isinstance(state, Mapping | list | tuple):
        yield place, fingerprint(state)
        return
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from _fingerprints(value, f"{place}.{key}" if place else str(key))


def _ignore(_: object) -> None: ...


def _waits(recipe_class: type[Recipe], values: dict[str, Any]) -> Iterator[Finding]:
    """Look for values that a step asks the device for; on the meta device there are none."""
    # Unfused, because meta has no fused kernels; no optimizer steps here.
    config = _config(recipe_class, values, "fp16", fused=False)
    file = inspect.getfile(recipe_class)
    with _autocast_takes_meta():
        try:
            recipe = recipe_class(config, META)
        except Exception as error:
            yield Finding(
                "warning",
                "waits for the device could not be looked for: the recipe cannot be made on "
                f"torch's meta device ({_first_line(error)})",
                _place_of(error, file),
            )
            return
        recipe.scaler = make_scaler(config, CPU)  # its tensors go where the losses are
        try:
            indices = torch.arange(config.training.batch_size)
            batch = recipe.batch(indices, torch.Generator().manual_seed(0))
            losses = recipe.training_step(batch)
            while True:
                with make_autocast(config, CPU):
                    loss = next(losses, None)
                if loss is None:
                    return
                total = torch.stack([each.value for each in as_losses(loss)]).sum()
                recipe.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            yield Finding(
                "error",
                "the step asks the device for a value, and the host waits for it: keep it on the "
                f"device, or do it in evaluate ({_first_line(error)})",
                _place_of(error, file),
            )


@contextmanager
def _autocast_takes_meta() -> Iterator[None]:
    """Let regions that a recipe opens for its device be opened on meta, as the CPU's."""
    original = torch.autocast.__init__

    def opened(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _place_of(error: BaseException, file: str) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{file.rpartition('/')[2]}:{own[-1].lineno}" if own else ""


def _lines(recipe_class: type[Recipe], report: Report) -> Iterator[str]:
    yield f"{recipe_class.name}: {STEPS} steps in each precision, on the CPU"
    for precision, steps in report.steps.items():
        if len(steps):
            skipped = np.count_nonzero(steps["flags"] & SKIPPED)
            yield (
                f"  {precision}  loss {steps['loss'][0]:.4g} → {steps['loss'][-1]:.4g}, "
                f"{skipped} skipped, {np.median(steps['step_us']) / 1000:.1f} ms a step"
            )
    for finding, precisions in sorted(report.findings.items(), key=lambda item: item[0].severity):
        only = f" [{', '.join(precisions)}]" if 0 < len(precisions) < len(PRECISIONS) else ""
        place = f"{finding.place}: " if finding.place else ""
        yield f"{finding.severity}: {place}{finding.text}{only}"
    yield "Errors to correct: see above." if report.errors else "No mistake found."


if __name__ == "__main__":
    main()
