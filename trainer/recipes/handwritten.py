"""The handwritten digits of scikit-learn: 1797 real images of 8 × 8 pixels.

They are read from its file, which takes 50 ms. Importing scikit-learn, with SciPy, would delay the
start of every run and worker by a second.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TRAIN_SIZE = 1437  # four fifths; the rest validates. The split does not depend on the run's seed.
PIXEL_MAX = 16.0


def load_digits() -> tuple[Tensor, Tensor]:
    """Return images (1797, 64) of 0…16 in fp32 and labels (1797,) of 0…9, in a fixed order."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("scikit-learn, which ships the digits, is not installed")
    table = np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    rows = torch.from_numpy(table)[order]
    return rows[:, :-1].float(), rows[:, -1].long()
