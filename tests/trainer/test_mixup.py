import pytest
import torch
import torch.nn.functional as F

from trainer.recipes.mixup import draw_share, mix, mix_cross_entropy
from trainer.recipes.top_k import hits


def test_the_share_follows_the_generator():
    """Equal seeds draw equal mixing shares; Beta's mean is a half, and a small α seldom mixes
    evenly.
    """
    torch.manual_seed(0)
    drawn = torch.stack([draw_share(0.2) for _ in range(2000)])
    torch.manual_seed(0)
    assert torch.equal(draw_share(0.2), drawn[0])
    assert drawn.dtype == torch.float32
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.05)
    assert drawn.var().item() == pytest.approx(0.25 / 1.4, rel=0.1)  # 1 / (4 (2α + 1))
    assert draw_share(0.0) == 1


def test_images_and_losses_are_mixed_alike():
    """Images and labels are mixed with the previous example's by the same share."""
    images = torch.eye(3).view(3, 3, 1, 1)
    blended = mix(images, torch.tensor(0.75))
    assert blended.view(3, 3).tolist() == [[0.75, 0, 0.25], [0.25, 0.75, 0], [0, 0.25, 0.75]]
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 3), torch.arange(3)
    soft = blended.view(3, 3) * 0.9 + 0.1 / 3
    torch.testing.assert_close(
        mix_cross_entropy(logits, labels, torch.tensor(0.75), 0.1), F.cross_entropy(logits, soft)
    )


def test_hits_are_counted_among_the_largest():
    """Hits count labels among the k largest logits; with k or fewer classes all are hits."""
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    labels = torch.tensor([0, 1, 0])
    assert [hits(logits, labels, k).item() for k in (1, 2, 5)] == [1, 2, 3]
