"""WGAN-GP: a generator draws digits, and a critic estimates their distance from real ones.

Two networks, two optimizers, one loss scaler. The critic's loss has a gradient penalty, which is
differentiated twice: the hardest pattern of mixed precision. Seconds on a CPU:

    halfstep recipe train wgan-gp --precision fp16

In each step the critic is trained first, then the generator with the updated critic. The critic has
a higher learning rate instead of five steps for each of the generator's, so both step once per step
(Heusel et al., 2017).

Shapes: B images in a batch, 64 pixels in −1…1, Z noise values.
Source: Gulrajani et al., "Improved Training of Wasserstein GANs", 2017.
"""

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe import Loss, Recipe, RecipeConfig, RunConfig
from trainer.recipes.handwritten import PIXEL_MAX, TRAIN_SIZE, load_digits

GRID, ZOOM = 8, 4  # the artifact: 8 × 8 digits, each pixel 4 wide


class WGANGPConfig(RecipeConfig):
    """Settings of generator and critic."""

    learning_rate: float = Field(
        2e-4, gt=0, title="Learning rate", description="Learning rate of the generator's Adam."
    )
    critic_learning_rate: float = Field(
        1e-3,
        gt=0,
        title="Critic's learning rate",
        description="Learning rate of the critic's Adam.",
    )
    width: int = Field(
        128,
        ge=1,
        le=8192,
        title="Width",
        description="Units in each hidden layer of both networks.",
    )
    noise: int = Field(32, ge=1, le=4096, title="Noise", description="Inputs of the generator.")
    penalty: float = Field(
        10.0,
        ge=0,
        title="Gradient penalty",
        description="Weight of the gradient penalty.",
    )


class WGANGP(Recipe):
    """Two small MLPs, Wasserstein loss with gradient penalty, Adam twice."""

    name: ClassVar = "wgan-gp"
    title: ClassVar = "Generated digits"
    description: ClassVar = "WGAN with gradient penalty: two optimizers under one loss scaler."
    Config: ClassVar = WGANGPConfig
    defaults: ClassVar = {
        "training": {"steps": 1000, "batch_size": 64, "max_grad_norm": None},
        "evaluation": {"every_steps": 200},
    }

    def __init__(self, config: RunConfig[WGANGPConfig], device: torch.device) -> None:
        settings, width = config.recipe, config.recipe.width
        self.device, self.noise, self.penalty = device, settings.noise, settings.penalty

        images = load_digits()[0].to(device) / (PIXEL_MAX / 2) - 1
        self.train_images, self.val_images = images[:TRAIN_SIZE], images[TRAIN_SIZE:]
        self.train_size = TRAIN_SIZE
        # Evaluated on the same noise each time, from a separate generator.
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(len(self.val_images), self.noise, generator=generator)
        self.val_noise = noise.to(device)

        critic = nn.Sequential(  # no BatchNorm: the penalty is for each image separately
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        ).to(device)
        generator_network = nn.Sequential(
            nn.Linear(self.noise, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 64),
            nn.Tanh(),
        ).to(device)
        self.modules = {"critic": critic, "generator": generator_network}

        def adam(network: nn.Module, learning_rate: float) -> torch.optim.Adam:
            return torch.optim.Adam(
                network.parameters(), learning_rate, betas=(0.0, 0.9), fused=config.training.fused
            )

        self.optimizers = {
            "critic": adam(critic, settings.critic_learning_rate),
            "generator": adam(generator_network, settings.learning_rate),
        }

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return images (B, 64), noise for both networks (2, B, Z), and mixing shares (B, 1)."""
        noise = torch.randn(2, len(indices), self.noise, generator=generator)
        shares = torch.rand(len(indices), 1, generator=generator)
        rows = indices.to(self.device, non_blocking=True)
        return (
            self.train_images[rows],
            noise.to(self.device, non_blocking=True),
            shares.to(self.device, non_blocking=True),
        )

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the critic's loss; once the critic has stepped, the generator's."""
        real, (critic_noise, generator_noise), shares = batch
        with torch.no_grad():
            fake = self.modules["generator"](critic_noise).float()  # (B, 64)
        mix = (shares * real + (1 - shares) * fake).requires_grad_()
        # One pass for all three, (3B, 1): the means of the scores, in fp32.
        scores = self.modules["critic"](torch.cat([real, fake, mix])).float()
        of_real, of_fake, of_mix = scores.chunk(3)
        loss = of_fake.mean() - of_real.mean()
        yield Loss(loss + self.penalty * self._slope_penalty(of_mix, mix), optimizer="critic")

        drawn = self.modules["generator"](generator_noise)
        yield Loss(-self.modules["critic"](drawn).float().mean(), optimizer="generator")

    def evaluate(self) -> dict[str, float]:
        """Return the distance of drawn digits from real ones, by the critic and by statistics."""
        fake = self.modules["generator"](self.val_noise).float()
        critic = self.modules["critic"]
        gap = critic(self.val_images).float().mean() - critic(fake).float().mean()
        return {
            "val/critic_gap": gap.item(),
            "val/frechet_distance": frechet_distance(self.val_images, fake),
        }

    def artifacts(self) -> dict[str, bytes | str]:
        """Return 64 drawn digits; the noise is the same each time, so they are comparable."""
        drawn = self.modules["generator"](self.val_noise[: GRID * GRID]).float()
        pixels = ((drawn + 1) * 127.5).clamp(0, 255).byte().view(GRID, GRID, 8, 8)
        picture = pixels.permute(0, 2, 1, 3).reshape(GRID * 8, GRID * 8).cpu().numpy()
        file = io.BytesIO()
        Image.fromarray(np.kron(picture, np.ones((ZOOM, ZOOM), np.uint8))).save(file, "PNG")
        return {"digits.png": file.getvalue()}

    def _slope_penalty(self, scores: Tensor, inputs: Tensor) -> Tensor:
        """Return the mean of (‖∂score/∂input‖ − 1)², to be differentiated again.

        The gradient is taken of the *scaled* scores, because it would underflow in fp16 like any
        other, and of their mean, because at a scale of 65,536 each score's own gradient would
        overflow. It is unscaled out of place, so that the penalty does not depend on the scale. The
        scale is a device tensor: `scaler.get_scale()` would make the host wait for it.
        Source: PyTorch's AMP examples, "Gradient penalty".
        """
        scale = self.scaler.scale(torch.ones((), device=self.device))
        with torch.autocast(self.device.type, enabled=False):  # a backward pass: outside autocast
            [scaled] = torch.autograd.grad(scores.mean() * scale, inputs, create_graph=True)
            slopes = (scaled * (len(scores) / scale)).norm(dim=1)  # (B,), fp32 as the inputs are
            penalty: Tensor = (slopes - 1).square().mean()
        return penalty


def frechet_distance(real: Tensor, fake: Tensor) -> float:
    """Return the Fréchet distance between two sets of images (N, 64), taken as Gaussians.

    Like FID, but of pixels: digits of 8 × 8 need no network as feature extractor.
    """
    real, fake = real.double().cpu(), fake.double().cpu()
    covariances = torch.cov(real.T), torch.cov(fake.T)
    # The trace of the square root of a product is the sum of the roots of its eigenvalues.
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt()
    spread = covariances[0].trace() + covariances[1].trace() - 2 * roots.sum()
    return float((real.mean(dim=0) - fake.mean(dim=0)).square().sum() + spread)
