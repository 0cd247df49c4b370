"""The exact list of operators that a step adds to PyTorch's own loop."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.recipe import Loss
from halfstep.run_config import parse_config
from tests.marks import sampled
from tests.operators import Operators
from tests.trainer.conftest import Regression
from trainer.distributed.ranks import Ranks
from trainer.prepared_recipe import PreparedRecipe
from trainer.setup import make_context
from trainer.step import make_autocast, make_scaler, train_step

CPU = torch.device("cpu")
STEPS = 10  # the scale's bounds are applied in every 16th


class Many(Regression):
    """A recipe with a given number of parameters: vectors of four, summed."""

    wanted, kind = 10, "AdamW"

    def __init__(self, config, device):
        self.device, self.train_size = device, 64
        self.inputs = torch.randn(64, 4)
        self.targets = self.inputs.sum(dim=1, keepdim=True)
        model = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(self.wanted))
        self.modules = {"model": model}
        fused, optimizer = self.kind != "AdamW", getattr(torch.optim, self.kind.split()[-1])
        self.optimizers = {"it": optimizer(model.parameters(), lr=1e-3, fused=fused)}

    def training_step(self, batch):
        inputs, targets = batch
        weight = torch.stack(list(self.modules["model"])).sum(dim=0)
        yield Loss(F.mse_loss(inputs @ weight[:, None], targets), "it")


KINDS = ("AdamW", "fused AdamW", "fused SGD")
PRECISIONS = ("fp16", "bf16", "fp32")
#: One of each precision and optimizer; the other combinations run in `make test-all`.
SAMPLE = list(zip((6, 100, 6), KINDS, PRECISIONS, strict=True))
all_kinds = pytest.mark.parametrize(
    ("parameters", "kind", "precision"),
    sampled(product((6, 100), KINDS, PRECISIONS), SAMPLE),
)


def usual_step(step) -> Counter[str]:
    """Return the operators of the most frequent kind of step."""
    kinds = Counter()
    for _ in range(STEPS):
        with Operators() as operators:
            step()
        kinds[frozenset(operators.counts.items())] += 1
    [(operators, _)] = kinds.most_common(1)
    return Counter(dict(operators))


def surplus(monkeypatch, parameters, kind, precision, *, clip, **values) -> dict[str, int]:
    """Return the operators that our step adds to a bare loop's."""
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", 1e9)
    recipe_class = type("Some", (Many,), {"wanted": parameters, "kind": kind})
    training = {"max_grad_norm": 1.0 if clip else None, **values}
    config = parse_config(
        recipe_class,
        # While a replay watches, it keeps the random states.
        {"precision": precision, "training": training, "diagnosis": {"replay_skips": 0}}
        | ({"scaler": {"init_scale": 1.0}} if precision == "fp16" else {}),  # no step skips
    )
    recipe = recipe_class(config, CPU)
    scaler = recipe.scaler = make_scaler(config, CPU)
    batch = recipe.inputs[:8], recipe.targets[:8]
    autocast = make_autocast(config, CPU)
    [optimizer] = recipe.optimizers.values()

    def bare():
        optimizer.zero_grad()
        with autocast:
            [loss] = recipe.training_step(batch)
        scaler.scale(loss.value).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(recipe.modules["model"].parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    context, observers = make_context(
        PreparedRecipe(recipe, recipe.modules, config, CPU, Ranks()),
        on_steps=lambda steps: None,
        on_event=lambda event: None,
        at=0.0,
    )

    def with_telemetry():
        context.observers.before_step(1)
        train_step(context, [batch])
        observers.telemetry.tick()

    more = usual_step(with_telemetry)
    more.subtract(usual_step(bare))
    return {name.removeprefix("aten."): count for name, count in more.items() if count}


@all_kinds
def test_a_step_takes_two_operators_beyond_a_bare_loop(monkeypatch, parameters, kind, precision):
    """A step adds two operators to a bare loop, one for all norms and one for the row."""
    assert surplus(monkeypatch, parameters, kind, precision, clip=False) == {
        "_foreach_norm": 1,
        "stack": 1,
    }


@all_kinds
def test_a_clipped_step_takes_one(monkeypatch, parameters, kind, precision):
    """A clipped step adds one operator, for the row, since the clip computes the norms."""
    assert surplus(monkeypatch, parameters, kind, precision, clip=True) == {"stack": 1}
