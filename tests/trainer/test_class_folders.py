import numpy as np
import pytest
from PIL import Image

from halfstep.run_config import ConfigError
from trainer.recipes.class_folders import LabelledImages, find


def write(folder, *names):
    """Write small grey images with these names; a pixel's value is the image's number."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(folder / name)


def names_of(images):
    """Return the names of images in order."""
    return [name.decode() for name in images.names]


def test_classes_are_folders_in_order_of_their_names(tmp_path):
    """Labels are classes of train and val by name; folders within a class are searched."""
    write(tmp_path, "train/dog/a.png", "train/cat/deep/b.JPG", "train/cat/a.png")
    write(tmp_path, "val/dog/c.png", "val/cat/d.png")
    (tmp_path / "train/cat/notes.txt").touch()
    (tmp_path / "train/.cache").mkdir()
    train, val = find(tmp_path)
    assert train.classes == val.classes == ("cat", "dog")
    assert names_of(train) == ["cat/a.png", "cat/deep/b.JPG", "dog/a.png"]
    assert train.labels.tolist() == [0, 0, 1]
    assert names_of(val) == ["cat/d.png", "dog/c.png"]


def test_without_val_some_of_each_class_validate(tmp_path):
    """Without val a tenth of each class, at least one image, always validates and does not
    train.
    """
    write(tmp_path, *(f"cat/{n:02}.png" for n in range(20)), "dog/a.png", "dog/b.png")
    train, val = find(tmp_path)
    assert names_of(val) == ["cat/05.png", "cat/15.png", "dog/b.png"]
    assert len(train) == 19
    assert not set(names_of(train)) & set(names_of(val))
    assert names_of(find(tmp_path)[1]) == names_of(val)


def test_an_example_is_read_when_it_is_wanted(tmp_path):
    """An image is read on demand, as transformed RGB with its label."""
    write(tmp_path, "train/cat/a.png", "train/dog/a.png", "val/cat/a.png", "val/dog/a.png")
    dataset = LabelledImages(find(tmp_path)[0], np.asarray)
    pixels, label = dataset[1]
    assert (pixels.shape, label, len(dataset)) == ((4, 4, 3), 1, 2)
    assert (pixels == 1).all()


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n\x00\x00"])
def test_a_broken_image_is_named(tmp_path, content):
    """The error for a broken image has its path."""
    write(tmp_path, "cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")
    (tmp_path / "cat/a.png").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/cat/a.png cannot be read as an image: "):
        find(tmp_path)[0].read(0)


def test_an_image_that_ends_too_early_is_named(tmp_path):
    """A truncated image is reported with its path."""
    write(tmp_path, "cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(
        path := tmp_path / "cat/a.png"
    )
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"cat/a.png cannot be read as an image: .*truncated"):
        find(tmp_path)[0].read(0)


def test_a_folder_without_classes_is_rejected(tmp_path):
    """The error for a folder without classes names the folder or class and the missing part."""
    with pytest.raises(ConfigError, match="/gone': this folder does not exist"):
        find(tmp_path / "gone")
    write(tmp_path, "a.png")
    with pytest.raises(ConfigError, match="it has no class folders"):
        find(tmp_path)
    write(tmp_path, "cat/a.png", "cat/b.png")
    with pytest.raises(ConfigError, match="it has 1 class folders"):
        find(tmp_path)
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog/readme.txt").touch()
    with pytest.raises(ConfigError, match=r"the class dog has no images; .*\.jpg"):
        find(tmp_path)
    write(tmp_path, "dog/a.png")
    with pytest.raises(ConfigError, match="the class dog has only one image"):
        find(tmp_path)
    write(tmp_path, "train/cat/a.png", "train/dog/a.png", "val/cat/a.png", "val/cow/a.png")
    with pytest.raises(ConfigError, match="only one of them has cow, dog"):
        find(tmp_path)
