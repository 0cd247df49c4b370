"""Direction of metrics: whether lower or higher is better."""

import math
import re
from collections.abc import Mapping, Sequence

#: Words in names of metrics for which lower or higher is better.
_LOW = """
    loss nll error err perplexity ppl mae mse rmse wer cer fid bpb seconds ms us bytes
"""
_HIGH = """
    accuracy acc top1 top5 f1 auc auroc auprc map miou iou dice bleu rouge rougel meteor recall psnr
    ssim mfu utilisation
"""
LOW, HIGH = frozenset(_LOW.split()), frozenset(_HIGH.split())
#: Spellings of top1 and top5, such as "top-1".
_TOP = re.compile(r"\btop[-_ @](?=[15]\b)")


def lowest(name: str, configs: Sequence[Mapping[str, object]]) -> bool | None:
    """Return whether lower is better for a metric; None if unknown.

    It is known from the runs' policy for the best checkpoint, else from words in the name; if these
    disagree it is unknown.
    """
    policies = [config.get("checkpoints") for config in configs]
    directions = {
        policy.get("best_is", "highest") == "lowest"
        for policy in policies
        if isinstance(policy, dict) and policy.get("keep_best") == name
    }
    if not directions:
        words = set(re.split(r"[^a-z0-9]+", _TOP.sub("top", name.lower())))
        directions = {is_low for is_low, known in ((True, LOW), (False, HIGH)) if words & known}
    return directions.pop() if len(directions) == 1 else None


def best(values: Sequence[float | None], *, is_lowest: bool) -> frozenset[int]:
    """Return the indexes of the best values; empty without two different finite values."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(set(finite)) < 2:
        return frozenset()
    top = min(finite) if is_lowest else max(finite)
    return frozenset(i for i, value in enumerate(values) if value == top)
