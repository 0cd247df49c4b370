"""Mixup: each image is blended with another of its batch, and learns the labels of both.

Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_share(alpha: float) -> Tensor:
    """Draw how much of itself an image keeps, from Beta(α, α), by torch's global generator.

    Returns fp32, 0-dimensional; 1 for an alpha of 0.
    """
    if alpha == 0:
        return torch.ones(())
    return torch._sample_dirichlet(torch.full((2,), alpha, dtype=torch.float64))[0].float()


def mix(images: Tensor, share: Tensor) -> Tensor:
    """Return each of the images (B, C, H, W), blended with the one before it."""
    return images * share + images.roll(1, dims=0) * (1 - share)


def mix_cross_entropy(
    logits: Tensor, labels: Tensor, share: Tensor, label_smoothing: float
) -> Tensor:
    """Return the mean loss of logits (B, K) of mixed images; labels: (B,), of the unmixed ones."""
    own = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    other = F.cross_entropy(logits, labels.roll(1), label_smoothing=label_smoothing)
    return own * share + other * (1 - share)
