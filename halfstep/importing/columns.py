"""Which logged number is which column of a step, where its name makes that evident."""

import re
from collections.abc import Iterable

#: As written once letters are small and separators one underscore; the first that is there is it.
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
    "skipped": ("skipped",),  # as we export it: 1 of a step that was
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate", "lr_group_0"),
}


def columns_of(names: Iterable[str]) -> dict[str, str]:
    """Return the column of each name that has one; no two have the same."""
    written: dict[str, str] = {}
    for name in sorted(names):
        written.setdefault(re.sub(r"[^a-z0-9]+", "_", name.lower()), name)
    found = {}
    for column, known in NAMES.items():
        for each in known:
            if each in written:
                found[written[each]] = column
                break
    return found
