"""What half precision does to what stays, buffers and weights, and which settings say nothing."""

import math
from collections.abc import Iterator
from typing import Any

from db.health.advice_words import AdviceWords
from db.health.finding import Finding

NAMES_SHOWN = 12
POWERS_LEFT = 5.0  # fewer than these are told
LARGEST_FP16 = 65504.0
LOST = 0.25  # share of the updates


def uncalled(found: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield what the spool's event of modules that are not called says."""
    if found:
        yield Finding(
            "A setting names modules that are not called",
            f"{', '.join(found['modules'][:NAMES_SHOWN])}: what modules.fp32, modules.bf16 or "
            "modules.checkpointed says of them holds for calls, and another module uses their "
            "weights by itself, as MultiheadAttention does those of its out_proj. Name that one.",
        )


def little_headroom(found: dict[str, Any] | None, words: AdviceWords) -> Iterator[Finding]:
    """Yield what the newest look at the headroom of an fp16 run says, before the first overflow.

    Of outputs in fp16 alone: gradients are near the limit where the scale is well, for it grows
    until one overflows.
    """
    outputs = [
        (float(each["activation"]), each["name"])
        for each in (found or {}).get("modules", ())
        if each.get("dtype") in (None, "float16")
    ]
    largest, name = max(((m, n) for m, n in outputs if 0 < m < math.inf), default=(0.0, ""))
    if found and largest and (left := math.log2(LARGEST_FP16 / largest)) < POWERS_LEFT:
        yield Finding(
            f"{left:.1f} powers of two left in {name}",
            f"In step {found['step']:,} its largest activation was {largest:,.5g}; beyond fp16's "
            "65,504 it is infinite, and no loss scale helps. If it grows from look to look, under "
            f"Headroom, run it in fp32 in time, {words.in_fp32}, or use bf16.",
            module=name,
            remedies=("bf16",),
            part="headroom",
        )


def poisoned(found: dict[str, Any] | None, words: AdviceWords) -> Iterator[Finding]:
    """Yield the finding of the earliest `poison` event."""
    if not found:
        return
    more = found["count"] - len(found["buffers"])
    names = ", ".join(found["buffers"]) + (f" and {more:,} more" if more else "")
    step = f"{found['step']:,}"
    if found.get("at_end"):
        seen = f"Seen after step {step}: {names}. They were finite before the first step, and"
        start = "Start from a checkpoint in which they are finite"
    else:
        seen = f"After the skip at step {step}: {names}. The scaler kept that step from the"
        seen += " weights, not from running statistics, and"
        start = "Start from a checkpoint before that step"
    yield Finding(
        "Buffers are not finite",
        f"{seen} no later batch takes an inf or NaN out of them: the network is lost in "
        f"evaluation. {start}, with {words.restore}the module ahead of them in fp32, "
        f"{words.in_fp32}.",
        before=None if found.get("at_end") else found["step"],
        remedies=("restore_buffers",),
        cause="nonfinite_buffers",
    )


def rounded_away(updates: dict[str, Any] | None, words: AdviceWords) -> Iterator[Finding]:
    """Yield what the newest count of updates says, as db.telemetry.histograms has it."""
    if not updates or not updates["modules"]:
        return
    if "saved" in updates["modules"][0]:  # what stayed this time moves another time
        return
    wanted, lost = (sum(each[name] for each in updates["modules"]) for name in ("wanted", "lost"))
    worst = updates["modules"][0]
    if lost > LOST * wanted:
        yield Finding(
            "Updates round away",
            f"At step {updates['step']:,}, {100 * lost / wanted:.2g} % of the weights in bf16 that "
            f"had a gradient stayed as they were, most in {worst['name'] or 'the top'} "
            f"({100 * worst['share']:.2g} %): the update is less than half the distance to the "
            f"next bf16 number. Keep the weights in fp32{words.keep_in_fp32}: autocast computes in "
            "bf16 all the same. A larger learning rate loses fewer.",
            part="updates",
        )
