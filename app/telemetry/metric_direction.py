"""Which way a number is better, as far as a run or the number's name says so."""

import math
import re
from collections.abc import Sequence
from typing import Any

#: Words of metrics' names, apart from anything else that stands in them.
_LOW = """
    loss nll error err perplexity ppl mae mse rmse wer cer fid bpb seconds ms us bytes
"""
_HIGH = """
    accuracy acc top1 top5 f1 auc auroc auprc map miou iou dice bleu rouge rougel meteor recall psnr
    ssim mfu utilisation
"""
LOW, HIGH = frozenset(_LOW.split()), frozenset(_HIGH.split())
#: Of equal names the same: "top-1" is top1.
_TOP = re.compile(r"\btop[-_ @](?=[15]\b)")


def lowest(name: str, configs: Sequence[dict[str, Any]]) -> bool | None:
    """Tell whether a metric is best where it is lowest, or highest; None where nobody says.

    A run says it that keeps its best checkpoint by it. Runs or words that disagree say nothing.
    """
    policies = [config.get("checkpoints") for config in configs]
    told = {
        policy.get("best_is", "highest") == "lowest"
        for policy in policies
        if isinstance(policy, dict) and policy.get("keep_best") == name
    }
    if told:
        return told.pop() if len(told) == 1 else None
    words = set(re.split(r"[^a-z0-9]+", _TOP.sub("top", name.lower())))
    found = {is_low for is_low, known in ((True, LOW), (False, HIGH)) if words & known}
    return found.pop() if len(found) == 1 else None


def best(values: Sequence[float | None], *, is_lowest: bool) -> frozenset[int]:
    """Return which of some values are the best; none where fewer than two can be told apart."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(set(finite)) < 2:
        return frozenset()
    top = min(finite) if is_lowest else max(finite)
    return frozenset(i for i, value in enumerate(values) if value == top)
