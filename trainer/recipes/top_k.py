"""Top-k accuracy."""

from torch import Tensor


def hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Count the labels (B,) that are among the k largest logits (B, K); k is at most K."""
    largest = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (largest == labels[:, None]).any(dim=1).sum()
