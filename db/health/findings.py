"""Findings about a run: problems with their evidence and remedies."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UnsetType
from sqlalchemy.orm import Session

from db.health import advice_words, causes, precision_findings, weights_findings
from db.health.advice_words import AdviceWords
from db.health.input_bound import DataWait, data_wait
from db.health.losses import Risen, risen
from db.health.scaling_health import scaling_health
from db.queue import quotas, workers
from db.runs import comparisons, groups
from db.tables import ACTIVE, ENDED, RECIPE, LatestMetric, Run, ScalerEvent, Status, Worker
from db.telemetry import latest_metrics, series, step_rows
from db.telemetry.stored_events import StoredEvents
from halfstep.diagnosis import fixes
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.finding import EXPLAINING, OF_NUMBERS, OF_PRECISION, OF_VALIDATION, Finding
from halfstep.number_formats import duration, number, percent
from halfstep.number_formats import scale as scale_text
from halfstep.telemetry import events
from halfstep.telemetry.flags import NONFINITE_LOSS
from halfstep.telemetry.scaling_health import ScalingHealth

SKIPS_READ = 50
REPLAYS_READ = 50
UNDERFLOW = 0.01  # share of gradients
ILL = ("collapsing", "dead")
FAILED_READ = 50
NAN_STEPS = 10  # first steps, all with a NaN loss: neither chance nor the search for a scale
LARGEST_RATE = 1.0  # no optimizer of torch trains with a larger one
USUAL_RATE = "usual_rate"  # the remedy for a larger one
HIGH_RATE = 0.1  # with a larger one a loss that rises is explained
OUTSIDE = "training_step"  # a replay's name for operations outside of all modules
NAMES_SHOWN = 6
#: Causes that can end a run with an exception, those of exceptions of the scaler included.
FATAL = EXPLAINING | {"no_inf_checks", "fp16_gradients"}


@dataclass(frozen=True)
class Evidence:
    """Evidence from which findings are derived."""

    health: ScalingHealth | None
    skips: Sequence[ScalerEvent] = ()  # the latest, with their culprits
    replays: Sequence[events.Replay] = ()  # the first ones
    modules: Sequence[events.HistogramModule] = ()  # of the newest histogram
    has_bf16: bool = False
    updates: events.Updates | None = None  # the newest count, by module
    # Modules that settings name but the model does not call.
    unused_modules: events.Uncalled | None = None
    shapes: events.Shapes | None = None  # layers that miss tensor cores
    failed: Sequence[events.FailedDiagnosis] = ()  # diagnoses that raised
    left_out: Sequence[events.LeftOut] = ()  # what is not possible for the run
    variant: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # of finished runs of the group
    data_wait: DataWait | None = None  # of the latest steps
    weights: events.Weights | None = None  # how the initial weights fit
    headroom: events.Headroom | None = None  # of an fp16 run, the newest
    rates: dict[str, float] = field(default_factory=dict)  # learning rates by setting path
    risen: Risen | None = None  # of a script, if its loss more than doubled
    over_storage: str = ""  # of a run in training: its project exceeds its storage limit
    nan_steps: int = 0  # all its steps, if the loss was NaN from the first on
    signs: causes.Signs = field(default_factory=causes.Signs)
    lost_metrics: Sequence[tuple[str, int]] = ()  # metrics with a non-finite latest value
    unlogged_best: str = ""  # of an ended run: the metric of checkpoints.keep_best, never logged
    words: AdviceWords = advice_words.RECIPE  # wording of remedies for its loop


def of_run(session: Session, run: Run) -> list[Finding]:
    """Read the evidence of a run and return its findings."""
    stored = StoredEvents(session, run)
    histogram = stored.newest(events.Histogram)
    left_out = stored.first(events.LeftOut, most=FAILED_READ)
    is_fp16 = groups.variant(run.settings) == "fp16"
    worker = session.get(Worker, run.worker_id) if run.worker_id else None
    skips = series.skips(session, run.id, most=SKIPS_READ) if run.skipped else []
    replays = stored.first(events.Replay, most=REPLAYS_READ) if run.skipped else ()
    # Only runs of a recipe can be forked with a remedy.
    is_recipe = run.source == RECIPE
    health = scaling_health(session, run)
    is_training = run.status in (Status.STARTING, Status.RUNNING)
    can_replay = not any(event.diagnosis == "replay" for event in left_out)
    may_replay = is_recipe and is_training and can_replay
    evidence = Evidence(
        health=health,
        signs=causes.read(session, run, stored, skips, replays, health, may_replay=may_replay),
        lost_metrics=latest_metrics.nonfinite(session, run.id, most=NAMES_SHOWN),
        skips=skips,
        replays=replays,
        modules=histogram.modules if histogram else (),
        has_bf16=worker is not None and "bf16" in workers.precisions(worker.devices),
        unused_modules=stored.newest(events.Uncalled),
        updates=stored.newest(events.Updates),
        shapes=stored.newest(events.Shapes),
        failed=stored.first(events.FailedDiagnosis, most=FAILED_READ),
        left_out=left_out,
        variant=groups.variant(run.settings),
        seconds=groups.seconds(session, run.group_id) if run.group_id else {},
        data_wait=data_wait(session, run),
        weights=stored.newest(events.Weights),
        headroom=stored.newest(events.Headroom) if is_fp16 else None,
        rates=rates(run.settings),
        risen=None if is_recipe else risen(session, run),
        over_storage=quotas.over_storage(session, run.project) if run.status in ACTIVE else "",
        nan_steps=_nan_steps(session, run),
        unlogged_best=_find_unlogged_best(session, run) if is_recipe else "",
        words=advice_words.RECIPE if is_recipe else advice_words.SCRIPT,
    )
    findings = list(find(evidence))
    # If the learning rate is far too large, no other remedy helps.
    is_rate = any(USUAL_RATE in finding.remedies for finding in findings)
    return [
        finding
        if is_recipe and (USUAL_RATE in finding.remedies or not is_rate)
        else replace(finding, module=None, remedies=())
        for finding in findings
    ]


def certain_cause(session: Session, run: Run) -> str:
    """Return the certain cause of skips or non-finite numbers as the end of a sentence, or ""."""
    first = next((finding for finding in of_run(session, run) if finding.cause), None)
    if first is None or not first.is_certain or first.cause not in EXPLAINING:
        return ""
    since = "" if first.before is None or "step" in first.title else f" (step {first.before:,})"
    return f". Cause: {first.title}{since}"


def rates(settings: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the learning rates among settings, by their paths."""
    result: dict[str, float] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            result |= rates(value, f"{prefix}{name}.")
        elif (name == "lr" or name.endswith("learning_rate")) and type(value) in (int, float):
            result[f"{prefix}{name}"] = float(value)
    return result


def find(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of the evidence, the most severe first."""
    rate = list(_rate(evidence))
    yield from rate
    findings = list(causes.named(evidence.signs, evidence.words))
    is_explained = any(finding.is_fault for finding in rate)
    if is_explained:  # numbers that are not finite, and no advice on them helps
        findings = [row for row in findings if row.cause not in OF_NUMBERS]
    if evidence.nan_steps:  # "The loss is NaN from the first step on" says more
        findings = [row for row in findings if row.is_certain or row.cause]
    if not (findings or is_explained):
        yield from _not_a_number(evidence)
    yield from findings
    named = {finding.cause for finding in findings if finding.cause}
    if not (is_explained or OF_VALIDATION in named):
        yield from _metrics(evidence)
    yield from weights_findings.find_partial_start(evidence.weights)
    yield from precision_findings.find_unused_modules(evidence.unused_modules)
    if not (evidence.nan_steps or is_explained):
        has_module = any(finding.module for finding in findings)
        yield from _of_precision(evidence, named - {OF_VALIDATION}, has_module=has_module)
    yield from _starving(evidence)
    yield from _slower(evidence)
    yield from _shapes(evidence)
    yield from _find_failed(evidence)
    yield from _no_best(evidence)
    yield from _over_storage(evidence)


def _of_precision(evidence: Evidence, named: Set[str], *, has_module: bool) -> Iterator[Finding]:
    """Yield findings due to the range of fp16 and bf16, or to the loss scale.

    named: causes found before; a mistake in the loop excludes the precision as the cause.
    has_module: one of them names a module.
    """
    if named <= OF_PRECISION:
        yield from _losses(evidence)
    if "nonfinite_buffers" not in named:
        yield from precision_findings.nonfinite_buffers(
            evidence.signs.one(events.NonfiniteBuffers), evidence.words
        )
    if named - OF_PRECISION - {"nonfinite_buffers"}:
        return
    yield from _one_module(evidence)
    yield from () if has_module else _find_replayed(evidence)
    yield from precision_findings.little_headroom(evidence.headroom, evidence.words)
    yield from _underflow(evidence)
    yield from precision_findings.find_rounded_away(evidence.updates, evidence.words)
    if named & OF_PRECISION or (not named and evidence.signs.skipped):
        yield from _bf16(evidence)


def _metrics(evidence: Evidence) -> Iterator[Finding]:
    if lost := evidence.lost_metrics:
        names = ", ".join(f"{name} (step {step:,})" for name, step in lost[:NAMES_SHOWN])
        yield Finding(
            f"{lost[0][0]} is not finite" if len(lost) == 1 else "Metrics are not finite",
            f"The latest value of {names} is NaN or infinite. Possible causes are a metric over no "
            "samples, a division by 0, or non-finite weights or buffers in evaluation.",
            cause="metric_nonfinite",
            fix=fixes.METRIC,
        )


def _rate(evidence: Evidence) -> Iterator[Finding]:
    for path, rate in evidence.rates.items():
        if rate > LARGEST_RATE:
            yield Finding(
                "The learning rate is far too large",
                f"{path} is {number(rate)}: a step changes each weight by more than its own size. "
                "Usual values are 0.0001 to 0.1; neither precision nor loss scale can fix this.",
                remedies=(USUAL_RATE,),
                is_fault=True,
            )
    if (risen := evidence.risen) and risen.rate > HIGH_RATE:
        yield Finding(
            "The learning rate is too high",
            f"With a learning rate of {number(risen.rate)}, the loss rose from "
            f"{number(risen.losses[0])} at step {risen.first:,} to {number(risen.losses[1])} at "
            f"step {risen.last:,}. Usual values are 0.0001 to 0.1; neither precision nor loss "
            "scale can fix this.",
            is_certain=False,
        )


def _not_a_number(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.nan_steps:
        return
    text = f"It was NaN in each of {_steps(evidence.nan_steps)}"
    if scales := [skip.scale_before for skip in evidence.skips if skip.scale_before]:
        text += f", at every loss scale down to {scale_text(min(scales))}"
    text += (
        ": neither the updates nor the loss scale is the cause, and no setting of either fixes it. "
        f"{causes.first_seen(evidence.signs)}Look "
        "for a NaN in the data or the initial weights, the logarithm of 0, the square root of a "
        "negative number, a division by 0, or inf divided by inf after an overflow of fp16."
    )
    if evidence.variant != "fp32":
        text += (
            " Run it in fp32 to confirm: if its loss is NaN as well, the precision is not the "
            "cause."
        )
    part = "skipped" if evidence.skips else ""
    yield Finding(
        "The loss is NaN from the first step on",
        text,
        remedies=("fp32",),
        part=part,
        is_fault=True,
    )


def _losses(evidence: Evidence) -> Iterator[Finding]:
    if not (lost := evidence.signs.lost):
        return
    reasons = []
    if lost.has_nan:
        reasons.append(
            "The usual cause of NaN is a mean over zero elements, such as a batch without labels "
            "or an empty mask."
        )
    if lost.has_inf:
        reasons.append(
            "The usual cause of inf is a term without a gradient: a class masked with "
            "-inf, the logarithm of 0 under a mask, or a sum or mean that overflows in fp16 "
            "although its gradient does not."
        )
    yield Finding(
        "The loss is not finite, but its gradients are",
        f"The optimizer stepped in {lost.count:,} {'step' if lost.count == 1 else 'steps'} with a "
        f"non-finite loss, most recently in step {lost.last:,}. The weights stay finite as long as "
        f"the gradients do. {' '.join(reasons)} Check the batch of that "
        "step, exclude such elements from the loss before averaging, and compute the loss in fp32.",
        is_fault=True,
    )


def _one_module(evidence: Evidence) -> Iterator[Finding]:
    modules = [
        {parameter["name"].rpartition(".")[0] for parameter in skip.culprits}
        for skip in evidence.skips
        if not skip.loss_nonfinite and skip.culprits
    ]
    overflowing = set().union(*modules)
    others = {module.name for module in evidence.modules} - overflowing
    if _is_unwell(evidence) and len(modules) > 1 and len(overflowing) == 1 and others:
        [name] = overflowing
        yield Finding(
            "Only one module overflows",
            f"At {len(modules):,} of the last {len(evidence.skips):,} skips, all with known "
            f"parameters and a finite loss, only {name or 'the top-level module'} had non-finite "
            "gradients. Run it in fp32, "
            f"{evidence.words.in_fp32}, so that the scale can grow.",
            module=name or None,
            before=min(skip.step for skip in evidence.skips),
            part="skipped",
        )


def _find_replayed(evidence: Evidence) -> Iterator[Finding]:
    """Yield the module that overflows in most replays.

    Overflows of the backward pass count only if the loss scaling is unhealthy, and if no smaller
    scale was measured to fit: occasional ones are normal with the scale at its limit.
    """
    replays = [
        replay
        for replay in evidence.replays
        if replay.found and replay.exact and replay.module not in (None, "", OUTSIDE)
        if str(replay.dtype).endswith("float16")
        if not replay.kind or replay.kind == "overflow"
        if replay.direction == "forward" or (_is_unwell(evidence) and not _fits(replay.defect))
    ]
    if not replays:
        return
    name, times = Counter(replay.module for replay in replays).most_common(1)[0]
    mine = [replay for replay in replays if replay.module == name]
    yield Finding(
        f"{name} overflows",
        f"In {times:,} of {len(evidence.replays):,} replayed skips, the first non-finite number "
        f"arose in this module, in the {mine[-1].direction} pass, in "
        f"{mine[-1].operation}. Run it in fp32, with modules.fp32; a comparison of both runs "
        "shows the extra time and the skips avoided.",
        module=name,
        before=min(replay.step for replay in mine),
        part="skipped",
    )


def _fits(defect: Defect | UnsetType | None) -> bool:
    """Return whether a loss scale was measured with which the step does not overflow."""
    return isinstance(defect, Defect) and (defect.fits_below or 0) >= 1


def _underflow(evidence: Evidence) -> Iterator[Finding]:
    counted = [(sum(module.counts), module) for module in evidence.modules]
    total = sum(count for count, _module in counted)
    lost = sum(count * float(module.underflow) for count, module in counted)
    if evidence.health and total and lost > UNDERFLOW * total:
        worst = max(evidence.modules, key=lambda module: float(module.underflow))
        yield Finding(
            "Gradients underflow",
            f"{percent(lost / total)} of the gradients that are not zero are below fp16's "
            f"smallest number at this scale; the largest share is in "
            f"{worst.name or 'the top-level module'} ({percent(float(worst.underflow))}). Start "
            "with a larger "
            f"{evidence.words.scaler('init_scale')} or let it grow sooner with a smaller "
            f"{evidence.words.scaler('growth_interval')}; the slider under Gradients shows which "
            "scale loses fewer.",
            part="exponents",
        )


def _bf16(evidence: Evidence) -> Iterator[Finding]:
    if evidence.health and evidence.health.word in ILL and evidence.has_bf16:
        yield Finding(
            "bf16 is available",
            "The device of this run supports bf16. It has the exponent range of fp32, so it needs "
            "no loss scale and skips no steps; it has 8 bits of precision, fp16 has 11."
            f"{evidence.words.compare}",
            remedies=("bf16",),
        )


def _starving(evidence: Evidence) -> Iterator[Finding]:
    wait = evidence.data_wait
    if wait and wait.is_real:
        yield Finding(
            "Training is input-bound",
            f"{wait.per_cent} % of the last {_steps(wait.steps)} waited for data, for "
            f"{percent(wait.share)} of their total time. {evidence.words.load_faster}; decode "
            "and resize once before training, and pack small files into a few large ones."
            f"{evidence.words.draw_faster}",
        )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _slower(evidence: Evidence) -> Iterator[Finding]:
    mine, fp32 = evidence.seconds.get(evidence.variant), evidence.seconds.get("fp32")
    if evidence.variant not in ("fp32", groups.TF32) and mine and fp32 and mine > fp32:
        yield Finding(
            "Mixed precision is slower here than fp32",
            f"The same run took {duration(mine)}, and {duration(fp32)} in fp32: "
            f"{number(mine / fp32, 3)} times as long. On a CPU, fp16 is always slower. On a GPU, "
            "use larger batches and layers, with sizes that are multiples of 8, and a fused "
            "optimizer.",
        )


def _shapes(evidence: Evidence) -> Iterator[Finding]:
    if event := evidence.shapes:
        more = event.count - len(event.layers)
        layers = ", ".join(event.layers) + (f" and {more:,} more" if more else "")
        batch = event.batch_size
        yield Finding(
            "Shapes miss tensor cores",
            f"On a GPU, fp16 and bf16 are fast if the dimensions of matrix products are multiples "
            "of 8. Here "
            f"{percent(float(event.share))} of the weights are in layers with other sizes: "
            f"{layers}{f'; the batch size is {batch:,}' if batch else ''}. Use multiples of 8 for "
            "widths, channels and batch size, and pad the vocabulary to one. (A last layer with "
            "few "
            "classes is not counted: its outputs cost little.)",
        )


def _find_failed(evidence: Evidence) -> Iterator[Finding]:
    for event in evidence.failed:
        yield Finding(
            f"The {event.diagnosis} failed",
            f"At step {event.step:,}: {event.error}. The run continues without it; the "
            "log has the traceback.",
            part="log",
        )
    for skipped in evidence.left_out:
        text = f"{skipped.reason[:1].upper()}{skipped.reason[1:]}."
        yield Finding(f"The {skipped.diagnosis} is not available", text)


def _no_best(evidence: Evidence) -> Iterator[Finding]:
    if name := evidence.unlogged_best:
        yield Finding(
            "No checkpoint was kept as the best",
            f"checkpoints.keep_best is {name}, but the run logged no metric of this name. Set it "
            "to the name of a metric that the recipe logs.",
            part="metrics",
        )


def _find_unlogged_best(session: Session, run: Run) -> str:
    """Return the metric by which an ended run keeps its best checkpoint, if it never logged it."""
    name: str = run.settings.get("checkpoints", {}).get("keep_best") or ""
    if not (name and run.own_steps and run.status in ENDED):
        return ""
    return "" if session.get(LatestMetric, (run.id, name)) else name


def _is_unwell(evidence: Evidence) -> bool:
    return evidence.health is not None and evidence.health.word in ("oscillating", *ILL)


def _nan_steps(session: Session, run: Run) -> int:
    """Return the number of a run's steps if the loss was NaN in all of them, else 0."""
    is_nan = run.loss is None and run.last_flags & NONFINITE_LOSS  # else it is unknown
    if run.own_steps < NAN_STEPS or not is_nan:
        return 0
    if run.source != RECIPE and run.skipped < run.own_steps:  # its script may log no loss
        return 0
    first = next(iter(step_rows.read_rows(session, run.id, most=1)), None)
    is_infinite = first is not None and math.isinf(first.loss or 0.0)
    has_a_number = comparisons.lowest_losses(session, [run.id])
    return 0 if has_a_number or is_infinite else run.own_steps


def _over_storage(evidence: Evidence) -> Iterator[Finding]:
    if evidence.over_storage:
        yield Finding(
            "The project exceeds its storage limit",
            f"{evidence.over_storage[0].upper()}{evidence.over_storage[1:]}. This run continues "
            "and saves its checkpoints, but no new run is accepted: delete checkpoints or runs "
            "that are no longer needed, and empty the trash.",
        )
