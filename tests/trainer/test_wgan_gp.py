import pytest
import torch
from PIL import Image

from halfstep.run_config import parse_config
from tests.trainer.conftest import CPU
from trainer.recipes.wgan_gp import WGANGP, frechet_distance
from trainer.step import make_autocast, make_scaler

SMALL = {"width": 32, "noise": 8}


def critic_loss(precision, scale):
    """Return the critic's first loss and its unscaled gradients."""
    values = {"precision": precision, "scaler": {"init_scale": scale}, "recipe": SMALL}
    config = parse_config(WGANGP, values)
    torch.manual_seed(0)
    recipe = WGANGP(config, CPU)
    recipe.scaler = scaler = make_scaler(config, CPU)
    batch = recipe.batch(torch.arange(32), torch.Generator().manual_seed(0))
    with make_autocast(config, CPU):
        loss = next(recipe.training_step(batch))
    scaler.scale(loss.value).backward()
    scaler.unscale_(recipe.optimizers["critic"])
    gradients = [p.grad for p in recipe.modules["critic"].parameters() if p.grad is not None]
    return loss.value.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**14])
def test_the_penalty_does_not_depend_on_the_scale(scale):
    """Loss and gradients of the penalty in fp16 equal fp32's at any scale.

    Mutations: the inner gradient not unscaled; not scaled; without create_graph.
    """
    expected, expected_gradient = critic_loss("fp32", 1.0)
    loss, gradient = critic_loss("fp16", scale)
    assert loss == pytest.approx(expected, rel=1e-2)
    assert (gradient - expected_gradient).norm() < 0.02 * expected_gradient.norm()


@pytest.mark.slow
def test_skips_are_counted_for_each_optimizer(monkeypatch, run_loop):
    """Skips of each optimizer equal those of the scaler's kernel."""
    truth = []
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def spy(gradients, found_inf, inverse_scale):
        truth.append(not all(bool(gradient.isfinite().all()) for gradient in gradients))
        kernel(gradients, found_inf, inverse_scale)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", spy)
    values = {
        "recipe": SMALL,
        "training": {"steps": 60},
        "scaler": {"init_scale": 2.0**22, "growth_interval": 4},
        "evaluation": {"every_steps": None},
    }
    run = run_loop(WGANGP, values)
    flags = run.records["flags"]
    assert [bool(flag & 1 << 8) for flag in flags] == truth[0::2]
    assert [bool(flag & 1 << 9) for flag in flags] == truth[1::2]
    assert truth[0::2] != truth[1::2]
    for name, own in (("critic", truth[0::2]), ("generator", truth[1::2])):
        skips = run.of("scaler", kind="skip", optimizer=name)
        assert [event["step"] for event in skips] == [n for n, one in enumerate(own, 1) if one]


@pytest.mark.extended
def test_drawn_digits_come_nearer_to_real_ones(run_loop):
    """In fp16, 300 steps halve the distance between generated and real digits."""
    values = {
        "recipe": SMALL | {"learning_rate": 2e-3, "critic_learning_rate": 4e-3},
        "training": {"steps": 300},
        "evaluation": {"every_steps": None},
    }
    run = run_loop(WGANGP, values)
    start = WGANGP(parse_config(WGANGP, {"recipe": SMALL}), CPU)
    start.modules["generator"].eval()
    with torch.no_grad():
        before = start.evaluate()["val/frechet_distance"]
    assert run.of("metric", name="val/frechet_distance")[-1]["value"] < before / 2


def test_the_distance_of_a_set_to_itself_is_zero():
    """The distance of a set to itself is zero, and grows with the square of a mean shift."""
    images = torch.randn(200, 4)
    assert frechet_distance(images, images) == pytest.approx(0, abs=1e-3)
    assert frechet_distance(images, images + 1) == pytest.approx(4, abs=1e-3)


def test_the_picture_shows_64_digits(run_loop, tmp_path):
    """After an evaluation there is a PNG of 8 × 8 digits with 4-fold pixels."""
    values = {"recipe": SMALL, "training": {"steps": 1}}
    run_loop(WGANGP, values, folder=tmp_path / "checkpoints")
    [path] = (tmp_path / "artifacts").rglob("*.png")
    with Image.open(path) as picture:
        assert picture.size == (256, 256)
        assert len(picture.getcolors()) > 10
