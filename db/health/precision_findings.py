"""Findings about half precision: headroom, buffers, lost updates and unused settings."""

import math
from collections.abc import Iterator

from msgspec import UNSET

from db.health.advice_words import AdviceWords
from halfstep.diagnosis.finding import Finding
from halfstep.number_formats import number, percent
from halfstep.telemetry import events

NAMES_SHOWN = 12
POWERS_LEFT = 5.0  # fewer than these are reported
LARGEST_FP16 = 65504.0
LOST = 0.25  # share of the updates


def find_unused_modules(event: events.Uncalled | None) -> Iterator[Finding]:
    """Yield the finding of an `uncalled` event: settings for modules that are not called."""
    if event:
        yield Finding(
            "A setting names modules that are not called",
            f"{', '.join(event.modules[:NAMES_SHOWN])}: modules.fp32, modules.bf16 and "
            "modules.checkpointed apply when a module is called, but another module uses the "
            "weights of these directly, as MultiheadAttention does with its out_proj. Name that "
            "module instead.",
        )


def little_headroom(event: events.Headroom | None, words: AdviceWords) -> Iterator[Finding]:
    """Yield a warning if activations of an fp16 run are close to an overflow.

    Only for outputs in fp16: gradients are always near the limit with a healthy scale, which grows
    until one overflows.
    """
    outputs = [
        (float(module.activation), module.name)
        for module in (event.modules if event else ())
        if not module.dtype or module.dtype == "float16"
    ]
    largest, name = max(((m, n) for m, n in outputs if 0 < m < math.inf), default=(0.0, ""))
    if event and largest and (left := math.log2(LARGEST_FP16 / largest)) < POWERS_LEFT:
        yield Finding(
            f"{name} has {number(left, 2)} powers of two of headroom",
            f"In step {event.step:,} its largest activation was {number(largest)}; above fp16's "
            f"maximum of 65,504 it becomes infinite, which no loss scale prevents. If it keeps "
            f"growing (see Headroom), run it in fp32, {words.in_fp32}, or use bf16.",
            module=name,
            remedies=("bf16",),
            part="headroom",
        )


def nonfinite_buffers(
    event: events.NonfiniteBuffers | None, words: AdviceWords
) -> Iterator[Finding]:
    """Yield the finding of the earliest `poison` event."""
    if not event:
        return
    more = event.count - len(event.buffers)
    names = ", ".join(event.buffers) + (f" and {more:,} more" if more else "")
    step = f"{event.step:,}"
    if event.at_end:
        seen = f"Seen after step {step}: {names}. They were finite before the first step, and"
        start = "Start from a checkpoint in which they are finite"
    else:
        seen = f"After the skip at step {step}: {names}. The scaler skipped the update of"
        seen += " the weights, but running statistics had already changed, and"
        start = "Start from a checkpoint before that step"
    remedy = f", with {words.restore}the module before them in fp32, {words.in_fp32}."
    if event.at_end and words.find_operator:  # which may be undefined in fp32, too
        remedy = f".{words.find_operator}"
    yield Finding(
        "Buffers are not finite",
        f"{seen} no later batch removes an inf or NaN from them: evaluation of the network fails. "
        f"{start}{remedy}",
        before=None if event.at_end else event.step,
        remedies=("restore_buffers",),
        cause="nonfinite_buffers",
    )


def find_rounded_away(event: events.Updates | None, words: AdviceWords) -> Iterator[Finding]:
    """Yield a finding if many updates of bf16 weights are lost to rounding."""
    modules = [module for module in event.modules if module.wanted] if event else []
    # With stochastic rounding the weights move in other steps.
    if event is None or not modules or any(module.saved is not UNSET for module in modules):
        return
    needed, lost = sum(module.wanted for module in modules), sum(module.lost for module in modules)
    worst = max(modules, key=_share_lost)
    if lost > LOST * needed:
        yield Finding(
            "Updates round away",
            f"At step {event.step:,}, {percent(lost / needed)} of the weights in bf16 that "
            f"had a gradient did not change; the largest share is in "
            f"{worst.name or 'the top-level module'} ({percent(_share_lost(worst))}). The update "
            "is less than half the distance to the "
            f"next bf16 number. Keep the weights in fp32{words.keep_in_fp32}: autocast computes in "
            "bf16 all the same. With a larger learning rate, fewer updates are lost.",
            part="updates",
        )


def _share_lost(module: events.UpdatedModule) -> float:
    return module.lost / module.wanted
