"""A recipe to start from. It runs as it is: copy it, and change it piece by piece.

    halfstep recipe check recipe_template.py
    halfstep recipe train recipe_template.py --precision fp16

What each method may and may not do is in docs/how-to/recipes.md.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from halfstep.recipe import Loss, Recipe, RecipeConfig, RunConfig

TRAIN_SIZE = 354  # four fifths of the 442 patients


class DiabetesConfig(RecipeConfig):
    """What can be set; the form for a new run is drawn from these fields."""

    width: int = Field(64, ge=1, le=8192, title="Width", description="Units in the hidden layer.")


class Diabetes(Recipe):
    """Predict the course of a disease from ten figures about a patient."""

    name: ClassVar = "diabetes"
    title: ClassVar = "Diabetes"
    description: ClassVar = "A small regression, to start a recipe of your own from."
    Config: ClassVar = DiabetesConfig
    # What differs from the defaults that all recipes share.
    defaults: ClassVar = {
        "training": {"steps": 300, "batch_size": 32},
        "evaluation": {"every_steps": 100},
    }

    def __init__(self, config: RunConfig[DiabetesConfig], device: torch.device) -> None:
        self.device = device
        figures, course = load_diabetes(return_X_y=True)
        order = torch.randperm(len(course), generator=torch.Generator().manual_seed(0))
        inputs = torch.tensor(figures, dtype=torch.float32)[order]
        targets = torch.tensor(course, dtype=torch.float32)[order]
        inputs, targets = inputs / inputs.std(dim=0), (targets - targets.mean()) / targets.std()
        self.train_inputs, self.val_inputs = inputs.to(device).split([TRAIN_SIZE, 88])
        self.train_targets, self.val_targets = targets.to(device).split([TRAIN_SIZE, 88])
        self.train_size = TRAIN_SIZE

        # In fp32: autocast casts what may be cast, for the time of one step.
        model = nn.Sequential(
            nn.Linear(10, config.recipe.width), nn.ReLU(), nn.Linear(config.recipe.width, 1)
        ).to(device)
        self.modules = {"model": model}
        self.optimizers = {
            "adamw": torch.optim.AdamW(
                model.parameters(), lr=config.recipe.learning_rate, fused=config.training.fused
            )
        }

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs (B, 10) and targets (B,)."""
        rows = indices.to(self.device, non_blocking=True)
        return self.train_inputs[rows], self.train_targets[rows]

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the mean squared error; autocast takes it in fp32."""
        inputs, targets = batch
        outputs = self.modules["model"](inputs).squeeze(1)  # (B,), fp16 in an fp16 run
        self.log({"train/error": (outputs.float() - targets).abs().mean()})
        yield Loss(F.mse_loss(outputs, targets), optimizer="adamw")

    def evaluate(self) -> dict[str, float]:
        """Return the share of the variance that is explained."""
        outputs = self.modules["model"](self.val_inputs).squeeze(1).float()
        unexplained = F.mse_loss(outputs, self.val_targets) / self.val_targets.var()
        return {"val/r2": 1 - unexplained.item()}
