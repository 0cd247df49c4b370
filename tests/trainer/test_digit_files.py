import numpy as np
import pytest

from halfstep.run_config import ConfigError
from trainer.recipes import digit_files
from trainer.recipes.class_folders import find
from trainer.recipes.handwritten import TRAIN_SIZE, load_digits


@pytest.mark.slow
def test_the_digits_are_written_once(tmp_path, monkeypatch):
    """All digits are written once, with the pixels and the split of the other recipes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = digit_files.digit_folder()
    train, val = find(folder)
    assert (len(train), len(val)) == (TRAIN_SIZE, 1797 - TRAIN_SIZE)
    assert train.classes == tuple("0123456789")
    images, labels = load_digits()
    number = int(train.names[0].decode().partition("/")[2].removesuffix(".png"))
    assert labels[number] == train.labels[0]
    pixels = np.asarray(train.read(0))[..., 0]
    expected = (images[number].view(8, 8) * 255 / 16).round()
    np.testing.assert_array_equal(pixels, expected.numpy())
    monkeypatch.setattr(digit_files, "write_digits", None)  # it is not called
    assert digit_files.digit_folder() == folder
    assert [path.name for path in folder.parent.iterdir()] == ["digits"]


def test_who_comes_second_takes_the_files_of_the_first(tmp_path, monkeypatch):
    """Two processes that write the digits at once leave one folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "halfstep/digits"

    def overtake(written):
        for place in (written, folder):
            (place / "train").mkdir(parents=True)

    monkeypatch.setattr(digit_files, "write_digits", overtake)
    assert digit_files.digit_folder() == folder
    assert list(folder.parent.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    """The error for an unwritable cache says what to do."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"the digits cannot be written to .*XDG_CACHE_HOME"):
        digit_files.digit_folder()
