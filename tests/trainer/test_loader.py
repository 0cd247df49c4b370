"""Datasets that workers read: the same bits whoever reads them, and however often it is resumed."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from halfstep.recipe import Recipe, RecipeError
from halfstep.run_config import parse_config
from tests.trainer.conftest import CPU, Regression, assert_same_bits
from trainer.train import make_recipe

STEPS, EXAMPLES = 11, 37


class Noisy(Dataset):
    """Examples that are augmented from every global generator."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        inputs = index / EXAMPLES + noise
        return inputs, inputs.sum(dim=0, keepdim=True)


class Reading(Regression):
    """The regression on a dataset."""

    batch = Recipe.batch
    made = Noisy

    def __init__(self, config, device):
        super().__init__(config, device)
        self.dataset = self.made()


def settings(workers, **groups):
    """A run that goes over the end of an epoch, with a few saves."""
    training = {"steps": STEPS, "batch_size": 4, "accumulation_steps": 2}
    data = {"workers": workers, "prefetch": 3}
    return {"training": training, "data": data, "checkpoints": {"every_steps": 4}} | groups


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_no_bit(run_loop, tmp_path, workers):
    """Nor does a resume with another number: losses and weights are those of no worker at all."""
    alone = run_loop(Reading, settings(0), tmp_path / "alone")
    read = run_loop(Reading, settings(workers), tmp_path / "read")
    assert read.records["loss"].tolist() == alone.records["loss"].tolist()
    resumed = run_loop(
        Reading,
        settings(workers),
        tmp_path / "resumed",
        resume=tmp_path / "alone" / "step-00000004.pt",
    )
    assert resumed.of("resumed")[0]["exact"]
    assert resumed.records["loss"].tolist() == alone.records["loss"][4:].tolist()
    assert_same_bits(resumed.weights(), alone.weights())


def test_a_recipe_has_one_kind_of_data():
    """Neither, or both, is a sentence; the size is the dataset's."""

    class Neither(Regression):
        batch = Recipe.batch

    class Both(Reading):
        batch = Regression.batch

    for wrong, message in ((Neither, "no training data"), (Both, "overrides batch")):
        with pytest.raises(RecipeError, match=message):
            make_recipe(wrong, parse_config(wrong, {}), CPU)
    assert make_recipe(Reading, parse_config(Reading, {}), CPU).train_size == EXAMPLES
