"""Mapping of logged names to step columns, for names that are unambiguous."""

import re
from collections.abc import Iterable

#: Names in lower case, with "_" as separator; of several present names the first one is used.
NAMES = {
    "loss": ("train_loss", "loss", "training_loss", "loss_train", "train_loss_step", "batch_loss"),
    "scale": (
        "loss_scale",
        "grad_scale",
        "scale_loss_scale",
        "train_loss_scale",
        "train_grad_scale",
        "scaler_scale",
        "amp_scale",
        "amp_loss_scale",
        "gradscaler_scale",
    ),
    "grad_norm": ("grad_norm", "train_grad_norm", "gradient_norm", "train_gradient_norm"),
    "skipped": ("skipped",),  # as the exports write it: 1 for a skipped step
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate", "lr_group_0"),
}


def columns_of(names: Iterable[str]) -> dict[str, str]:
    """Map names to their columns, each column at most once."""
    by_slug: dict[str, str] = {}
    for name in sorted(names):
        by_slug.setdefault(re.sub(r"[^a-z0-9]+", "_", name.lower()), name)
    columns = {}
    for column, known in NAMES.items():
        for alias in known:
            if alias in by_slug:
                columns[by_slug[alias]] = column
                break
    return columns
