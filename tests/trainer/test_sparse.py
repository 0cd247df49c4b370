"""Sparse gradients of an embedding of which a batch reads a few rows."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from halfstep.recipe import Loss, Recipe, RecipeError
from trainer.distributed.ranks import Control, Request


def with_embedding(make, *, is_sparse=True, factor=1.0):
    """A recipe that trains rows of a table, some of them twice per batch."""

    class Table(Recipe):
        name: ClassVar = "table"
        title: ClassVar = "Table"
        description: ClassVar = "For tests."
        defaults: ClassVar = {"training": {"steps": 6, "batch_size": 8, "max_grad_norm": 0.1}}

        def __init__(self, config, device):
            self.train_size = 64
            table = nn.Embedding(16, 4, sparse=is_sparse).to(device)
            self.modules = {"table": table}
            self.optimizers = {"only": make(table.parameters())}

        def batch(self, indices, generator):
            return indices % 5

        def training_step(self, batch):
            rows = self.modules["table"](batch)
            yield Loss((rows.float() * factor - 1).square().mean(), "only")

    return Table


def sgd(parameters, **kwargs):
    """Return SGD with this test's arguments."""
    return torch.optim.SGD(parameters, lr=0.5, **kwargs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sparse_gradients_train_as_dense_ones(run_loop, precision):
    """Losses, norms and clips of sparse gradients equal those of dense ones."""
    values = {"precision": precision, "diagnosis": {"histogram_every_steps": 2}}
    sparse = run_loop(with_embedding(sgd), values)
    dense = run_loop(with_embedding(sgd, is_sparse=False), values)
    for column in ("loss", "grad_norm"):
        np.testing.assert_allclose(sparse.records[column], dense.records[column], rtol=1e-4)
    torch.testing.assert_close(sparse.weights(), dense.weights())
    assert sparse.records["grad_norm"][0] > 0.1  # the clip had something to do
    assert len(sparse.of("histogram")) == 3


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_the_other_optimizers_of_sparse_gradients_train_too(run_loop, make):
    """The loss falls with each other optimizer that supports sparse gradients."""
    recipe = with_embedding(lambda parameters: make(parameters, lr=0.1))
    run = run_loop(recipe, {"training": {"steps": 24}})
    assert run.records["loss"][-1] < run.records["loss"][0]


def test_a_sparse_overflow_is_counted_and_replayed(run_loop):
    """Overflowed elements of a sparse gradient are reported like a dense one's, and replayed."""
    values = {"scaler": {"init_scale": 2.0**127}, "training": {"steps": 3}}
    asked = iter([Control(None, Request(1, "replay", 2))])
    run = run_loop(with_embedding(sgd, factor=1e3), values, control=lambda: next(asked, Control()))
    assert run.list_skipped() == [1, 2, 3]
    [skip] = run.of("scaler", kind="skip", step=2)
    [replay] = run.of("replay", step=2)
    [culprit] = skip["culprits"]
    assert culprit["name"] == "table.weight"
    assert culprit["inf"] > 0
    assert replay["culprits"] == [{"optimizer": "only"} | culprit]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fused_optimizer_of_sparse_gradients_is_rejected(run_loop, precision):
    """A fused optimizer of sparse gradients is rejected with the parameter and the remedy."""
    recipe = with_embedding(lambda parameters: sgd(parameters, fused=True))
    with pytest.raises(RecipeError, match=r"the gradient of table.weight is sparse, .* fused=F"):
        run_loop(recipe, {"precision": precision})


def test_a_clip_by_value_of_sparse_gradients_is_rejected(run_loop):
    """A clip by value of sparse gradients, which torch lacks, is rejected."""
    with pytest.raises(RecipeError, match="cannot clip its elements"):
        run_loop(with_embedding(sgd), {"training": {"max_grad_value": 1.0}})
