"""What the figures of a run say is wrong, in words, and what to do about it."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.files import artifacts
from db.health import advice_words, causes, fixes, precision_findings, weights_findings
from db.health.advice_words import AdviceWords
from db.health.finding import Finding
from db.health.input_bound import Starvation, starvation
from db.health.verdict import Verdict, verdict
from db.queue import quotas, workers
from db.runs import comparisons, groups
from db.tables import ACTIVE, FLAGGED, RECIPE, SKIPPED, Run, ScalerEvent, Status, Step, Worker
from db.telemetry import histograms, latest_metrics, series
from db.telemetry.scales import in_words

SKIPS_READ = 50
REPLAYS_READ = 50
UNDERFLOW = 0.01  # share of gradients
ILL = ("collapsing", "dead")
FAILED = "failed_diagnosis"
NAN_STEPS = 10  # none of which had a loss that is a number: no chance, and no search for a scale
LARGEST_RATE = 1.0  # no optimizer of torch learns by more
USUAL_RATE = "usual_rate"  # what mends that
OUTSIDE = causes.OUTSIDE
NAMES_SHOWN = 6
#: Causes that another precision mends.
FORWARD = "forward_overflow"
OF_PRECISION = frozenset({FORWARD, "backward_overflow"})
#: Causes of a loss that is not finite, of skips, and of steps that teach nothing.
EXPLAINING = OF_PRECISION | {
    *("singular_gradient", "nonfinite_inputs", "nonfinite_without_scaler", "adam_eps_underflow"),
    *("gradients_not_cleared", "scaler_not_restored", "step_outside_scaler", "step_left_out"),
    *("no_gradient", "zero_gradients"),
}


@dataclass(frozen=True)
class Evidence:
    """What findings go by.

    lost_losses: applied steps whose loss was not finite.  skips: the latest, with their culprits.
    replays: the first, as the spool's events have them.  modules: of the newest histogram.  poison:
    the earliest, likewise.  updates: the newest count of them, by module.  uncalled, shapes: what
    settings name in vain, and what misses tensor cores.  signs: what causes are named by.
    lost_metrics: whose latest value is not finite.  failed: diagnoses that raised.  left_out: one
    that the run cannot have.  seconds: of the group's finished runs, by variant.  starvation: of
    the latest steps.  weights: how those fit that it started from.  headroom: of an fp16 run, the
    newest.  rates: learning rates, by the setting's path.  over_storage: of a run in training, that
    its project stores more than it may.  nan_steps: all its steps, if the loss was NaN from the
    first on.  words: what remedies are called in its loop.
    """

    verdict: Verdict | None
    lost_losses: int = 0
    skips: Sequence[ScalerEvent] = ()
    replays: Sequence[dict[str, Any]] = ()
    modules: Sequence[dict[str, Any]] = ()
    has_bf16: bool = False
    poison: dict[str, Any] | None = None
    updates: dict[str, Any] | None = None
    uncalled: dict[str, Any] | None = None
    shapes: dict[str, Any] | None = None
    failed: Sequence[dict[str, Any]] = ()
    left_out: dict[str, Any] | None = None
    variant: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    starvation: Starvation | None = None
    weights: dict[str, Any] | None = None
    headroom: dict[str, Any] | None = None
    rates: dict[str, float] = field(default_factory=dict)
    over_storage: str = ""
    nan_steps: int = 0
    signs: causes.Signs = field(default_factory=causes.Signs)
    lost_metrics: Sequence[tuple[str, int]] = ()
    words: AdviceWords = advice_words.RECIPE


def of_run(session: Session, run: Run) -> list[Finding]:
    """Read the evidence of a run and return what it shows."""
    newest = histograms.newest(session, run.id)
    poison = histograms.earliest(session, run.id, "poison")
    uncalled = histograms.newest(session, run.id, "uncalled")
    weights = histograms.newest(session, run.id, "weights")
    left_out = histograms.newest(session, run.id, "left_out")
    is_fp16 = groups.variant(run.settings) == "fp16"
    headroom = histograms.newest(session, run.id, "headroom") if is_fp16 else None
    shapes = artifacts.diagnoses(session, run.id, "shapes")
    worker = session.get(Worker, run.worker_id) if run.worker_id else None
    skips = series.skips(session, run.id, most=SKIPS_READ) if run.skipped else []
    replays = artifacts.first_replays(session, run.id, most=REPLAYS_READ) if run.skipped else ()
    # What a fork may mend it may mend of a recipe's run alone.
    is_recipe = run.source == RECIPE
    judged = verdict(session, run)
    is_training = run.status in (Status.STARTING, Status.RUNNING)
    may_replay = is_recipe and is_training and not left_out
    evidence = Evidence(
        verdict=judged,
        signs=causes.read(session, run, skips, replays, judged, may_replay=may_replay),
        lost_metrics=latest_metrics.nonfinite(session, run.id, most=NAMES_SHOWN),
        lost_losses=_lost_losses(session, run),
        skips=skips,
        replays=replays,
        modules=newest.content["modules"] if newest else (),
        has_bf16=worker is not None and "bf16" in workers.precisions(worker.devices),
        poison=poison.content if poison else None,
        uncalled=uncalled.content if uncalled else None,
        updates=histograms.updates(session, run.id),
        shapes=shapes[0].content if shapes else None,
        failed=[each.content for each in artifacts.diagnoses(session, run.id, FAILED)],
        left_out=left_out.content if left_out else None,
        variant=groups.variant(run.settings),
        seconds=groups.seconds(session, run.group_id) if run.group_id else {},
        starvation=starvation(session, run),
        weights=weights.content if weights else None,
        headroom=headroom.content if headroom else None,
        rates=rates(run.settings),
        over_storage=quotas.over_storage(session, run.project) if run.status in ACTIVE else "",
        nan_steps=_nan_steps(session, run),
        words=advice_words.RECIPE if is_recipe else advice_words.SCRIPT,
    )
    found = list(find(evidence))
    # With a rate beyond reason nothing else is the cause, and nothing else mends it.
    is_rate = any(USUAL_RATE in each.remedies for each in found)
    return [
        each
        if is_recipe and (USUAL_RATE in each.remedies or not is_rate)
        else replace(each, module=None, remedies=())
        for each in found
    ]


def certain_cause(session: Session, run: Run) -> str:
    """Return what the first finding names as the cause of numbers that are not finite or skips, as
    the end of a sentence; empty where none is certain.
    """
    first = next((each for each in of_run(session, run) if each.cause), None)
    if first is None or not first.is_certain or first.cause not in EXPLAINING:
        return ""
    since = "" if first.before is None or "step" in first.title else f" (step {first.before:,})"
    return f". Cause: {first.title[:1].lower()}{first.title[1:]}{since}"


def rates(settings: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the learning rates among settings, by their paths."""
    found: dict[str, float] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= rates(value, f"{prefix}{name}.")
        elif (name == "lr" or name.endswith("learning_rate")) and type(value) in (int, float):
            found[f"{prefix}{name}"] = float(value)
    return found


def find(evidence: Evidence) -> Iterator[Finding]:
    """Yield what the evidence shows, the gravest first."""
    yield from _rate(evidence)
    found = list(causes.named(evidence.signs, evidence.words))
    if evidence.nan_steps:  # of a loss that was never a number no overflow is certain
        found = [each for each in found if each.is_certain or each.cause != FORWARD]
    if not found:
        yield from _not_a_number(evidence)
    yield from found
    yield from _metrics(evidence)
    yield from weights_findings.started_in_part(evidence.weights)
    yield from precision_findings.uncalled(evidence.uncalled)
    named = {each.cause for each in found}
    if not evidence.nan_steps:
        has_module = any(each.module for each in found)
        yield from _of_precision(evidence, named, has_module=has_module)
    yield from _starving(evidence)
    yield from _slower(evidence)
    yield from _shapes(evidence)
    yield from _failed(evidence)
    yield from _over_storage(evidence)


def _of_precision(evidence: Evidence, named: Set[str], *, has_module: bool) -> Iterator[Finding]:
    """Yield what has its cause in what fp16 and bf16 can hold, or in the loss scale.

    named: causes that are known. What a mistake of the loop explains is no matter of precision.
    has_module: one of them names a module.
    """
    if named <= OF_PRECISION:
        yield from _losses(evidence)
    if "nonfinite_buffers" not in named:
        yield from precision_findings.poisoned(evidence.poison, evidence.words)
    if named - OF_PRECISION - {"nonfinite_buffers"}:
        return
    yield from _one_module(evidence)
    yield from () if has_module else _replayed(evidence)
    yield from precision_findings.little_headroom(evidence.headroom, evidence.words)
    yield from _underflow(evidence)
    yield from precision_findings.rounded_away(evidence.updates, evidence.words)
    if named & OF_PRECISION or (not named and evidence.signs.skipped):
        yield from _bf16(evidence)


def _metrics(evidence: Evidence) -> Iterator[Finding]:
    if lost := evidence.lost_metrics:
        names = ", ".join(f"{name} (step {step:,})" for name, step in lost[:NAMES_SHOWN])
        yield Finding(
            f"{lost[0][0]} is not finite" if len(lost) == 1 else "Metrics are not finite",
            f"The latest value of {names} is NaN or infinite. A metric "
            "that is computed over no sample, a division by 0, or weights or buffers that are not "
            "finite in evaluation lead there.",
            cause="metric_nonfinite",
            fix=fixes.METRIC,
        )


def _rate(evidence: Evidence) -> Iterator[Finding]:
    for path, rate in evidence.rates.items():
        if rate > LARGEST_RATE:
            yield Finding(
                "The learning rate is beyond reason",
                f"{path} is {rate:g}: a step moves each weight by more than it is large. Between "
                "0.0001 and 0.1 is usual; no precision and no loss scale mends this.",
                remedies=(USUAL_RATE,),
            )


def _not_a_number(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.nan_steps:
        return
    text = f"It was NaN in each of {_steps(evidence.nan_steps)}"
    if scales := [skip.scale_before for skip in evidence.skips if skip.scale_before]:
        text += f", at every loss scale down to {in_words(min(scales))}"
    text += (
        ": neither the updates nor the loss scale led there, and no setting of them mends it. Look "
        "for a NaN in the data or the starting weights, the log of zero, a root of less than zero, "
        "a division by zero."
    )
    if evidence.variant != "fp32":
        text += (
            " The same run in fp32 shows it: where its loss is NaN as well, the precision has no "
            "part in it."
        )
    part = "skipped" if evidence.skips else ""
    yield Finding("The loss is NaN from the first step on", text, remedies=("fp32",), part=part)


def _losses(evidence: Evidence) -> Iterator[Finding]:
    if evidence.lost_losses:
        yield Finding(
            "The loss is not finite, but its gradients are",
            f"{evidence.lost_losses:,} such steps were applied. What overflows has no part in the "
            "gradients: a term that is only reported, or an average over values that are masked "
            "out. The weights are sound as long as the gradients are; compute that term in fp32.",
        )


def _one_module(evidence: Evidence) -> Iterator[Finding]:
    modules = [
        {each["name"].rpartition(".")[0] for each in skip.culprits}
        for skip in evidence.skips
        if not skip.loss_nonfinite and skip.culprits
    ]
    overflowing = set().union(*modules)
    others = {each["name"] for each in evidence.modules} - overflowing
    if _is_unwell(evidence) and len(modules) > 1 and len(overflowing) == 1 and others:
        [name] = overflowing
        yield Finding(
            "Only one module overflows",
            f"At {len(modules):,} of the last {len(evidence.skips):,} skips, all those whose "
            f"parameters are known and whose loss was finite, only {name or 'the top'} had "
            "gradients that were not finite. Run it in fp32, "
            f"{evidence.words.in_fp32}, and "
            "the scale can grow.",
            module=name or None,
            before=min(skip.step for skip in evidence.skips),
            part="skipped",
        )


def _replayed(evidence: Evidence) -> Iterator[Finding]:
    """Name the module that most replays found; going backward, a scale at its limit is no fault."""
    found = [
        each
        for each in evidence.replays
        if each["found"] and each["exact"] and each["module"] not in (None, "", OUTSIDE)
        if str(each.get("dtype")).endswith("float16") and each.get("kind") in (None, "overflow")
        if each["direction"] == "forward" or _is_unwell(evidence)
    ]
    if not found:
        return
    name, times = Counter(each["module"] for each in found).most_common(1)[0]
    mine = [each for each in found if each["module"] == name]
    yield Finding(
        f"{name} overflows",
        f"Replays of {times:,} of the {len(evidence.replays):,} skips replayed found the first "
        f"number that is not finite there, going {mine[-1]['direction']}, in "
        f"{mine[-1]['operation']}. Run it in fp32, by modules.fp32; the comparison of both runs "
        "says what that costs in time and saves in skips.",
        module=name,
        before=min(each["step"] for each in mine),
        part="skipped",
    )


def _underflow(evidence: Evidence) -> Iterator[Finding]:
    counted = [(sum(each["counts"]), each) for each in evidence.modules]
    total = sum(count for count, _each in counted)
    lost = sum(count * each["underflow"] for count, each in counted)
    if evidence.verdict and total and lost > UNDERFLOW * total:
        worst = max(evidence.modules, key=lambda each: float(each["underflow"]))
        yield Finding(
            "Gradients underflow",
            f"{100 * lost / total:.2g} % of the gradients that are not zero lie below fp16's "
            f"smallest number at this scale, most in {worst['name'] or 'the top'} "
            f"({100 * worst['underflow']:.2g} %). Start with a larger "
            f"{evidence.words.scaler('init_scale')} or let it grow sooner with a smaller "
            f"{evidence.words.scaler('growth_interval')}; under Gradients, slide to a scale that "
            "loses less.",
            part="exponents",
        )


def _bf16(evidence: Evidence) -> Iterator[Finding]:
    if evidence.verdict and evidence.verdict.word in ILL and evidence.has_bf16:
        yield Finding(
            "bf16 is available",
            "The device of this run has it. bf16 has the exponents of fp32, so that it needs no "
            "loss scale and skips nothing; it has 8 bits of precision to fp16's 11."
            f"{evidence.words.compare}",
            remedies=("bf16",),
        )


def _starving(evidence: Evidence) -> Iterator[Finding]:
    found = evidence.starvation
    if found and found.is_real:
        yield Finding(
            "Training waits for data",
            f"{found.per_cent} % of the last {_steps(found.steps)} waited for data, for "
            f"{100 * found.share:.2g} % of their time in all. {evidence.words.load_faster}; decode "
            "and resize once, ahead of training, and keep small files together in few large ones."
            f"{evidence.words.draw_faster}",
        )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _slower(evidence: Evidence) -> Iterator[Finding]:
    mine, fp32 = evidence.seconds.get(evidence.variant), evidence.seconds.get("fp32")
    if evidence.variant not in ("fp32", groups.TF32) and mine and fp32 and mine > fp32:
        yield Finding(
            "Mixed precision is slower here than fp32",
            f"{mine:.3g} s to {fp32:.3g} s for the same run, {mine / fp32:.2g} times as long. On a "
            "CPU that is always so in fp16. On a GPU, make batch and layers larger and their sizes "
            "multiples of 8, and see that the optimizer is fused.",
        )


def _shapes(evidence: Evidence) -> Iterator[Finding]:
    if found := evidence.shapes:
        more = found["count"] - len(found["layers"])
        layers = ", ".join(found["layers"]) + (f" and {more:,} more" if more else "")
        batch = found["batch_size"]
        yield Finding(
            "Shapes miss tensor cores",
            f"On a GPU, fp16 and bf16 are fast where the sizes of a product are multiples of 8. "
            f"Here {100 * found['share']:.2g} % of the weights are in layers that have others: "
            f"{layers}{f'; the batch size is {batch:,}' if batch else ''}. Choose widths, channels "
            "and batch size as multiples of 8, and fill a vocabulary up to one. (The last layer of "
            "a few classes is left out: its outputs cost little.)",
        )


def _failed(evidence: Evidence) -> Iterator[Finding]:
    for each in evidence.failed:
        yield Finding(
            f"The {each['diagnosis']} failed",
            f"At step {each['step']:,}: {each['error']}. The run goes on without it; the "
            "log has the traceback.",
            part="log",
        )
    if found := evidence.left_out:
        reason = found["reason"]
        yield Finding(f"The {found['diagnosis']} is left out", f"{reason[:1].upper()}{reason[1:]}.")


def _is_unwell(evidence: Evidence) -> bool:
    return evidence.verdict is not None and evidence.verdict.word in ("oscillating", *ILL)


def _lost_losses(session: Session, run: Run) -> int:
    # Left alone, SQLite would read all steps rather than the index that holds just these.
    query = (
        select(func.count(Step.step))
        .with_hint(Step, "INDEXED BY ix_steps_nonfinite", "sqlite")
        .where(Step.run_id == run.id, FLAGGED["nonfinite"])
        .where(Step.flags.op("&")(SKIPPED) == 0)
    )
    # Without a scaler nothing holds a bad update back, and the reason is plain.
    unscaled = groups.variant(run.settings) != "fp16"
    return 0 if unscaled else session.scalar(query) or 0


def _nan_steps(session: Session, run: Run) -> int:
    """Return how many steps a run has made, if its loss was NaN from the first on, or 0."""
    if run.own_steps < NAN_STEPS or run.loss is not None:
        return 0
    if run.source != RECIPE and run.skipped < run.own_steps:  # its script may have told no loss
        return 0
    first = select(Step.loss).where(Step.run_id == run.id).order_by(Step.step).limit(1)
    has_a_number = comparisons.lowest_losses(session, [run.id])
    return 0 if has_a_number or math.isinf(session.scalar(first) or 0.0) else run.own_steps


def _over_storage(evidence: Evidence) -> Iterator[Finding]:
    if evidence.over_storage:
        yield Finding(
            "its project stores too much",
            f"{evidence.over_storage[0].upper()}{evidence.over_storage[1:]}. This run goes on and "
            "saves its checkpoints, but no further one is taken: delete checkpoints or runs that "
            "nobody needs, and empty the trash.",
        )
