import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.run_config import ConfigError, parse_config
from tests.marks import extended
from tests.trainer.conftest import CPU
from trainer.console import parse_assignments
from trainer.data.sources import drawn
from trainer.recipes import erfnet, streets
from trainer.recipes.erfnet import ERFNet, mean_iou

TINY = {"height": 16, "width": 32, "channels": 4, "blocks": 1, "dilations": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small folder with Cityscapes' layout."""
    path = tmp_path_factory.mktemp("cityscapes")
    streets.draw_folder(path)
    return path


def make(folder, **settings):
    """Return a small network for this folder."""
    values = {"recipe": TINY | {"folder": str(folder)} | settings}
    return ERFNet(parse_config(ERFNet, values), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", *extended(["fp32"])])
def test_it_trains_on_the_streets_that_it_draws(run_loop, precision):
    """Without a folder the loss falls on generated streets, and mean IoU is reported."""
    values = {"recipe": TINY, "precision": precision, "training": {"steps": 8, "batch_size": 4}}
    run = run_loop(ERFNet, values)
    metrics = {event["name"]: event["value"] for event in run.of("metric")}
    assert 0 <= metrics["val/mean_iou"] < 1
    assert metrics["val/loss"] > 0
    assert run.records["loss"][-1] < run.records["loss"][0]


@pytest.mark.slow
def test_it_is_evaluated_in_batches(folder):
    """Evaluation figures are those of all pixels, for any batch size and a smaller last batch."""
    seen = {}
    for size in (1, 5, 12):
        torch.manual_seed(0)
        values = {"recipe": TINY | {"folder": str(folder)}, "training": {"batch_size": size}}
        recipe = ERFNet(parse_config(ERFNet, values), CPU)
        model, batches = recipe.modules["model"].eval(), []
        model.register_forward_pre_hook(lambda _, given, kept=batches: kept.append(len(given[0])))
        with torch.no_grad():
            seen[size] = recipe.evaluate()
        assert batches == {1: [1] * 12, 5: [5, 5, 2], 12: [12]}[size]
    assert seen[1] == pytest.approx(seen[5], rel=1e-5)
    assert seen[1] == pytest.approx(seen[12], rel=1e-5)


def test_the_documented_command_evaluates_once_in_some_epochs():
    """With the 2,975 images of Cityscapes the documented command evaluates once in some epochs."""
    words = erfnet.__doc__.replace("\\", " ").split()
    command = words[words.index("train") + 1 : words.index("An")]
    config = parse_config(ERFNet, parse_assignments([word for word in command if "=" in word]))
    epoch = 2975 // config.training.batch_size
    assert epoch <= config.evaluation.every_steps <= 10 * epoch
    assert config.training.steps % config.evaluation.every_steps == 0


@pytest.mark.extended
def test_it_learns_to_separate_road_and_sky(run_loop, folder):
    """In fp32, 120 steps reach three times a constant prediction's score, about 0.06."""
    values = {
        "recipe": TINY | {"folder": str(folder), "dilations": 1},
        "precision": "fp32",
        "training": {"steps": 120, "batch_size": 8},
        "evaluation": {"every_steps": None},
    }
    run = run_loop(ERFNet, values)
    [iou] = [event["value"] for event in run.of("metric", name="val/mean_iou")]
    assert iou > 0.18


def test_published_labels_become_training_labels(folder):
    """Published labels become training labels: road, 7, is 0; the bonnet, 1, is ignored."""
    image, labels = streets.find(folder, "val")[0]
    pixels, classes = streets.read(image, labels, (128, 64))
    with Image.open(labels) as opened:
        published = np.asarray(opened)
    assert pixels.shape == (64, 128, 3)
    assert (classes[published == 7] == 0).all()
    assert (classes[published == 1] == streets.IGNORED).all()
    assert set(np.unique(classes)) <= {*range(19), streets.IGNORED}
    trained = labels.with_name(labels.name.replace("labelIds", "labelTrainIds"))
    Image.fromarray(classes).save(trained)
    try:
        assert streets.find(folder, "val")[0] == (image, trained)
        np.testing.assert_array_equal(streets.read(image, trained, (128, 64))[1], classes)
    finally:
        trained.unlink()


def test_the_drawn_streets_are_the_same_each_time(folder, tmp_path):
    """Generated streets have the same bytes each time."""
    streets.draw_folder(tmp_path)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.png"))
    assert len(files) == 2 * (48 + 12)
    assert all((folder / f).read_bytes() == (tmp_path / f).read_bytes() for f in files)


def test_images_and_labels_are_augmented_alike(folder):
    """Image and label are augmented alike, each example separately, with torch's generator."""
    dataset = make(folder).dataset

    def augment(seed):
        torch.manual_seed(seed)
        return [torch.stack(each) for each in zip(*map(dataset.__getitem__, range(6)), strict=True)]

    images, labels = augment(1)
    assert images.shape == (6, 3, 16, 32)
    assert torch.equal(images, augment(1)[0])
    assert not torch.equal(images, augment(2)[0])
    for image, label in zip(images, labels, strict=True):  # what was shifted in is black, ignored
        outside = (image == 0).all(dim=0).all(dim=1)
        assert (label[outside] == streets.IGNORED).all()


def test_ignored_pixels_do_not_count(folder):
    """Labels of ignored pixels change neither the loss nor its gradient."""
    recipe = make(folder)
    images, labels = drawn(recipe, torch.arange(2), CPU)
    labels[:, 4:, :] = streets.IGNORED
    [some] = [loss.value.item() for loss in recipe.training_step((images, labels))]
    logits = recipe.modules["model"](images / 255).log_softmax(dim=1)
    kept = labels[:, :4].flatten() != streets.IGNORED
    rows = logits[:, :, :4].permute(0, 2, 3, 1).flatten(0, 2)[kept]
    expected = -rows.gather(1, labels[:, :4].flatten()[kept, None].long()).mean()
    assert some == pytest.approx(expected.item(), rel=1e-2)  # the dropout of two passes differs


def test_mean_iou_counts_the_classes_that_occur():
    """Mean IoU is over classes that occur: here of two, with 2/3 and 1/2 of their unions hit."""
    confusion = torch.tensor([[2, 1, 0], [0, 1, 0], [0, 0, 0]])
    assert mean_iou(confusion) == pytest.approx((2 / 3 + 1 / 2) / 2)


@pytest.mark.slow
def test_the_prediction_is_a_picture(run_loop, folder, tmp_path):
    """After an evaluation an image shows input, prediction and truth below each other."""
    values = {
        "recipe": TINY | {"folder": str(folder)},
        "precision": "fp32",
        "training": {"steps": 1},
    }
    run_loop(ERFNet, values, folder=tmp_path / "checkpoints")
    [path] = (tmp_path / "artifacts").rglob("*.png")
    with Image.open(path) as picture:
        assert picture.size == (32, 3 * 16)
        published = np.asarray(picture.convert("RGB"))[32:]
    colours = {tuple(colour) for colour in published.reshape(-1, 3).tolist()}
    assert colours <= {colour for _, _, colour in streets.CLASSES} | {(0, 0, 0)}


def test_a_folder_with_another_layout_is_rejected(tmp_path, folder):
    """The error for another folder layout names the folder and its missing part."""
    with pytest.raises(ConfigError, match="it has no leftImg8bit/train/"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"recipe.height is 20: use a multiple of 8"):
        make(folder, height=20)
    images = tmp_path / "leftImg8bit/train/bern"
    images.mkdir(parents=True)
    (images / "bern_1_leftImg8bit.png").touch()
    with pytest.raises(ConfigError, match=r"bern_1_leftImg8bit.png has neither"):
        make(tmp_path)
