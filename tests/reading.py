"""A recipe with a dataset that data workers read, and a check of its augmentation."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset

from halfstep.recipe import Recipe
from tests.trainer.conftest import Regression

EXAMPLES = 37


class Noisy(Dataset):
    """Examples augmented by every global random generator."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        inputs = index / EXAMPLES + noise
        return inputs, inputs.sum(dim=0, keepdim=True)


class Reading(Regression):
    """The regression with a dataset."""

    batch = Recipe.batch
    made = Noisy

    def __init__(self, config, device):
        super().__init__(config, device)
        self.train_size = 0  # it is the dataset's
        self.dataset = self.made()
