"""Recipe checks before a long training: `halfstep recipe check mine.py`.

Runs five steps of the real loop in each precision on the CPU, with CUDA's autocast; one step on the
meta device, whose tensors have no values, so that any synchronisation raises; and compares four
steps with two, a resume and two more. Findings have source lines. Exit code 1 if there is an error.
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.check.report import left_out
from halfstep.check.session import CheckedLoop, CheckedSteps
from halfstep.config_groups import Precision
from halfstep.diagnosis.observations import MILD, Observation
from halfstep.diagnosis.statements import is_left_over, place_of, statement_of
from halfstep.number_formats import duration, number
from halfstep.recipe import Loss, Recipe, RecipeError
from halfstep.run_config import ConfigError, RunConfig
from halfstep.telemetry.events import Event, FailedDiagnosis, Shapes
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.spool import STEP_DTYPE, Steps
from trainer import registered_recipes
from trainer.console import parse_assignments
from trainer.diagnosis.cuda_autocast import cudas_autocast
from trainer.diagnosis.nondeterminism import Nondeterminism
from trainer.diagnosis.op_recorder import HALF, Finding, OpRecorder
from trainer.diagnosis.recipe_checks import (
    CPU,
    STEPS,
    check_batch,
    check_compiler,
    check_device,
    check_loss,
    check_resume,
    optimizers_of,
    small_config,
)
from trainer.diagnosis.source_locations import first_line, place
from trainer.logged_values import LOGGING
from trainer.loop import train
from trainer.registered_recipes import NotRegisteredError
from trainer.registry import UnknownRecipeError, file_of, load_recipe
from trainer.setup import prepare_run
from trainer.several_losses import as_losses

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")


@dataclass
class Report:
    """Results: the steps in each precision, and each finding with its precisions."""

    steps: dict[str, Steps] = field(default_factory=dict)
    findings: dict[Finding, list[str]] = field(default_factory=dict)

    def add(self, finding: Finding, precision: str | None = None) -> None:
        """Add a finding; the same one in several precisions is stored once."""
        precisions = self.findings.setdefault(finding, [])
        if precision:
            precisions.append(precision)

    @property
    def errors(self) -> list[Finding]:
        """Findings that are certainly mistakes."""
        return [finding for finding in self.findings if finding.severity == "error"]


def main(reference: str, settings: Sequence[str] = (), *, as_json: bool = False) -> None:
    """Check one recipe, print the findings, and store them with a registered recipe.

    Raises SystemExit with 1 if there are errors, with 2 if it cannot be checked.
    """
    full_reference, report = check_and_print(reference, settings, as_json=as_json)
    note(full_reference, report)
    if report.errors:
        sys.exit(1)


def check_and_print(
    reference: str, settings: Sequence[str] = (), *, as_json: bool = False
) -> tuple[str, Report]:
    """Check one recipe and print the findings; return its reference and the report.

    The reference of a file has its full path and its class.
    """
    try:
        recipe = load_recipe(reference)
        report = check(recipe, parse_assignments(settings))
    except (ConfigError, UnknownRecipeError, NotRegisteredError) as error:
        text = json.dumps({"error": str(error)}) if as_json else f"error: {error}"
        sys.stderr.write(f"{text}\n")
        sys.exit(2)
    if as_json:
        findings = {"recipe": recipe.name, "findings": _findings(report)}
        sys.stdout.write(json.dumps(findings) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(recipe, report)) + "\n")
    sys.stdout.flush()
    file = file_of(reference)
    return f"{file}:{recipe.__name__}" if file else reference, report


def note(reference: str, report: Report) -> None:
    """Store the findings for the page of recipes, if the class is registered."""
    if file_of(reference):
        registered_recipes.note_check(reference, _findings(report))


def _findings(report: Report) -> list[dict[str, object]]:
    return [
        {
            "severity": finding.severity,
            "place": finding.place,
            "text": finding.text,
            "precisions": precisions if len(precisions) < len(PRECISIONS) else [],
        }
        for finding, precisions in sorted(
            report.findings.items(), key=lambda item: item[0].severity
        )
    ]


def check(recipe_class: type[Recipe], values: JsonObject) -> Report:
    """Check a recipe by five steps in each precision and further checks.

    values: settings of a run.  Raises ConfigError for invalid ones.
    """
    with cudas_autocast():
        return _check(recipe_class, values)


def _check(recipe_class: type[Recipe], values: JsonObject) -> Report:
    report = Report()
    configs = {precision: small_config(recipe_class, values, precision) for precision in PRECISIONS}
    for finding in check_compiler(recipe_class, values):
        report.add(finding)
        return report
    measured: dict[tuple[str, str], Finding] = {}
    for precision, config in configs.items():
        op_recorder = OpRecorder(precision, "cpu", inspect.getfile(recipe_class))
        shadows = CheckedLoop(CheckedSteps(steps=STEPS))
        report.steps[precision] = _train(recipe_class, config, op_recorder, shadows)
        for finding in op_recorder.findings:
            report.add(finding, precision)
        for observation in shadows.found():
            if observation.is_fault:
                finding = _make_finding(observation)
                key = observation.first.kind, finding.place
                report.add(measured.setdefault(key, finding), precision)
        for sentence in left_out(shadows.report()):
            report.add(Finding("warning", sentence), precision)
    for finding in _compare(report, configs["fp16"].scaler.init_scale):
        report.add(finding)
    for question in (
        check_loss,
        check_batch,
        check_device,
        check_resume,
    ):
        if report.errors:  # the further checks need a recipe that runs
            break
        for finding in _answers(question, recipe_class, values):
            report.add(finding)
    return report


def _answers(
    question: Callable[..., Iterator[Finding]], recipe_class: type[Recipe], values: JsonObject
) -> Iterator[Finding]:
    try:
        yield from question(recipe_class, values)
    except (Exception, SystemExit) as error:  # it ran with the loop's own batches
        yield Finding(
            "warning",
            f"it raised when the check tried other batches: {first_line(error)}",
            place(inspect.getfile(recipe_class), error),
        )


def _make_finding(observation: Observation) -> Finding:
    """Return what the shadows of a step have shown."""
    defect, statement = observation.first, statement_of(observation)
    return Finding(
        "warning" if defect.kind in MILD or is_left_over(defect) else "error",
        f"{statement.text} {statement.advice}".strip(),
        place_of(defect.site),
    )


def _train(
    recipe_class: type[Recipe],
    config: RunConfig,
    op_recorder: OpRecorder,
    shadows: CheckedLoop,
) -> Steps:
    """Run the real loop, each operator once more in fp32; return the records of its steps."""
    records: list[Steps] = [np.zeros(0, STEP_DTYPE)]
    try:
        with _watch_scalers(op_recorder), shadows:
            train(
                prepare_run(
                    _make_observed(recipe_class, config, op_recorder),
                    config,
                    device=CPU,
                    on_steps=records.append,
                    on_event=lambda event: _see_event(event, op_recorder),
                )
            )
        op_recorder.summarise()
    except ConfigError:
        raise
    except RecipeError as error:
        op_recorder.found("error", str(error))
    except (Exception, SystemExit) as error:  # whatever a recipe raises is a finding
        op_recorder.found("error", first_line(error), place(op_recorder.file, error))
    return np.concatenate(records)


def _make_observed(
    recipe_class: type[Recipe], config: RunConfig, op_recorder: OpRecorder
) -> type[Recipe]:
    """Return a subclass of the recipe that records operations in the methods called by the loop."""

    class Observed(recipe_class):  # type: ignore[misc, valid-type]
        name = recipe_class.name

        def __init__(self, config: RunConfig, device: torch.device) -> None:
            super().__init__(config, device)
            _see_optimizers(self, config, op_recorder)
            self._without_gradient: dict[str, set[str]] = {}

        def batch(self, indices: Tensor, generator: torch.Generator) -> Any:
            op_recorder.in_batch = True
            with op_recorder:
                batch = super().batch(indices, generator)
            op_recorder.in_batch = False
            return batch

        def training_step(self, batch: object) -> Iterator[Loss | tuple[Loss, ...]]:
            losses = iter(super().training_step(batch))
            before: list[tuple[int, int]] | None = _weights_state(self)
            while True:
                with op_recorder, _looks_for_nondeterminism(config, op_recorder):
                    loss = next(losses, None)
                if before is not None and _weights_state(self) != before:
                    op_recorder.see_own_step()
                before = None  # from here on the loop may have stepped
                if loss is None:
                    return
                for part in as_losses(loss):
                    if part.value.dtype in HALF:
                        op_recorder.found(
                            "error",
                            f"the loss of {optimizers_of(part)} is {part.value.dtype}: it is not "
                            "computed by one of autocast's float32 loss functions; call .float() "
                            "on its inputs",
                        )
                _see_momentum(self, op_recorder)
                yield loss
                for part in as_losses(loss):
                    for optimizer in part.optimizers:
                        self._see_gradients(optimizer)

        def evaluate(self) -> dict[str, float]:
            metrics: dict[str, float] = super().evaluate()
            _see_metrics(metrics, op_recorder)
            for optimizer, names in self._without_gradient.items():
                for name in sorted(names):
                    op_recorder.found(
                        "warning",
                        f'parameter {name} of "{optimizer}" received no gradient in any step: it '
                        "is unused or detached",
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

    if recipe_class.batch is Recipe.batch:  # it has a dataset
        del Observed.batch
    return Observed


def _weights_state(recipe: Recipe) -> list[tuple[int, int]]:
    """Return version counters of each weight and gradient, which change with in-place updates."""
    return [
        (p._version, -1 if p.grad is None else p.grad._version)
        for module in recipe.modules.values()
        for p in module.parameters()
    ]


def _see_optimizers(recipe: Recipe, config: RunConfig, op_recorder: OpRecorder) -> None:
    trained = {
        p
        for optimizer in recipe.optimizers.values()
        for g in optimizer.param_groups
        for p in g["params"]
    }
    for module, network in recipe.modules.items():
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and parameter not in trained:
                op_recorder.found("warning", f"parameter {module}.{name} is in no optimizer")
        if any(isinstance(child, nn.DataParallel) for child in network.modules()):
            op_recorder.found(
                "warning",
                f'module "{module}" is a DataParallel, whose threads inherit whether autocast is '
                "on, but not its dtype. Use several devices for the run instead, with one process "
                "each",
            )
    for name, optimizer in recipe.optimizers.items():
        optimizer.register_step_pre_hook(partial(_see_step, op_recorder))
        if config.training.fused and not optimizer.defaults.get("fused"):
            op_recorder.found(
                "warning",
                f'optimizer "{name}" is not fused: PyTorch\'s scaler synchronizes host and device '
                "once per step. "
                + (
                    "Pass fused=config.training.fused"
                    if "fused" in optimizer.defaults
                    else "It has no fused implementation"
                ),
            )


def _see_step(op_recorder: OpRecorder, *_: object) -> None:
    if op_recorder.is_looking:  # the loop steps while the recipe waits
        op_recorder.see_own_step(op_recorder.place())


def _see_momentum(recipe: Recipe, op_recorder: OpRecorder) -> None:
    """Report fused SGD whose momentum stays uninitialised if its next step is skipped."""
    for name, optimizer in recipe.optimizers.items():
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
            is_at_risk = group["fused"] and group["momentum"] and recipe.scaler.is_enabled()
            if is_at_risk and any(
                optimizer.state.get(parameter, {}).get("momentum_buffer") is None
                for parameter in group["params"]
            ):
                op_recorder.found(
                    "error",
                    f'optimizer "{name}" is a fused SGD whose momentum was deleted or to which '
                    "parameters were added: torch allocates uninitialized momentum, and a skipped "
                    "step does not fill it. Set it to zeros: "
                    'state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)',
                )


def _looks_for_nondeterminism(
    config: RunConfig, op_recorder: OpRecorder
) -> AbstractContextManager[object]:
    # The compiler does not work under this mode.
    if config.training.deterministic and not config.training.compile:
        return Nondeterminism(op_recorder.see_nondeterminism)
    return nullcontext()


@contextmanager
def _watch_scalers(op_recorder: OpRecorder) -> Iterator[None]:
    """Report a recipe's own loss scalers that are enabled although the loop's is not."""
    original = GradScaler.__init__

    def made(self: GradScaler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
        if op_recorder.precision == "fp32" and bound.get("enabled", True):
            op_recorder.found(
                "error",
                "the recipe's own GradScaler is enabled in an fp32 run: use the loop's, "
                "self.scaler, which follows the run's precision",
                op_recorder.place(),
            )

    GradScaler.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradScaler.__init__ = original  # type: ignore[method-assign]


def _see_metrics(metrics: Any, op_recorder: OpRecorder) -> None:
    if not metrics:
        op_recorder.found(
            "warning", "evaluate returns no metrics, so a run's page shows only its training loss"
        )
        return
    for name, value in metrics.items():
        if not isinstance(value, float | int):
            kind = type(value).__name__
            op_recorder.found(
                "error", f'evaluate returns {kind} as "{name}": return a float, with .item()'
            )
        elif not math.isfinite(value):
            op_recorder.found(
                "warning", f'evaluate returns {value} as "{name}" after {STEPS} steps'
            )


def _see_event(event: Event, op_recorder: OpRecorder) -> None:
    if isinstance(event, FailedDiagnosis) and event.diagnosis == LOGGING:
        op_recorder.found("warning", f"a logged value is dropped: {event.error}")
    if isinstance(event, Shapes):
        op_recorder.found(
            "warning",
            f"layers that miss tensor cores, with sizes other than multiples of 8: "
            f"{', '.join(event.layers)}" + (", …" if event.count > len(event.layers) else ""),
        )


def _compare(report: Report, init_scale: float) -> Iterator[Finding]:
    """Report gradients of 0 in fp32, and a loss that is scaled or lost in fp16."""
    plain, half = report.steps["fp32"], report.steps["fp16"]["loss"]
    losses = enumerate(zip(plain["loss"], half, strict=False), 1)
    for step, (expected, loss) in losses if not report.errors else ():
        if math.isfinite(expected) and not math.isfinite(loss):
            yield Finding(
                "error",
                f"the loss is {number(loss)} at step {step} in fp16, {number(expected)} in fp32; "
                "the operator was not found",
            )
            break
    if len(plain) and not plain["grad_norm"].any():
        yield Finding(
            "warning",
            f"all gradients are 0 in each of {len(plain)} steps in fp32: the loss does not depend "
            "on the weights (a factor of 0, detach, or dead units)",
        )
    if len(plain) and len(half) and plain["loss"][0] and init_scale > 2 and math.isclose(
        half[0], plain["loss"][0] * init_scale, rel_tol=0.05
    ):  # fmt: skip
        yield Finding(
            "error", "training_step scales the loss, which the loop does; yield the unscaled loss"
        )


def _lines(recipe_class: type[Recipe], report: Report) -> Iterator[str]:
    yield f"{recipe_class.name}: {STEPS} steps in each precision, on the CPU"
    for precision, steps in report.steps.items():
        if len(steps):
            skipped = np.count_nonzero(steps["flags"] & SKIPPED)
            yield (
                f"  {precision}  loss {number(steps['loss'][0])} → {number(steps['loss'][-1])}, "
                f"{skipped} skipped, {duration(np.median(steps['step_us']) / 1e6)} per step"
            )
    for finding, precisions in sorted(report.findings.items(), key=lambda item: item[0].severity):
        only = f" [{', '.join(precisions)}]" if 0 < len(precisions) < len(PRECISIONS) else ""
        place = f"{finding.place}: " if finding.place else ""
        yield f"{finding.severity}: {place}{finding.text}{only}"
    if report.errors:
        yield "Correct the errors above."
    elif report.findings:
        yield "No errors. Review the warnings above."
    else:
        yield "No mistakes found."
