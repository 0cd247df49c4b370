"""What half precision has done to the numbers that stay: buffers that took an inf or a NaN."""

from collections.abc import Iterator
from typing import Any

from db.finding import Finding


def poisoned(found: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield what the spool's event of poison, the newest, says."""
    if not found:
        return
    more = found["count"] - len(found["buffers"])
    names = ", ".join(found["buffers"]) + (f" and {more:,} more" if more else "")
    yield Finding(
        "Buffers are not finite",
        f"After the skip at step {found['step']:,}: {names}. The scaler kept that step from the "
        "weights, not from running statistics, and no later batch takes an inf or NaN out of them: "
        "the network is lost in evaluation. Start from a checkpoint before that step with "
        "scaler.restore_buffers, or with the module ahead of them in fp32, by modules.fp32.",
        before=found["step"],
    )
