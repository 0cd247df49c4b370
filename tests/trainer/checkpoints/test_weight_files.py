"""Weights in files of other tools."""

import json

import pytest
import torch
from safetensors.torch import save_file

from trainer.checkpoints.weight_files import WeightsError, read_weights

ONE, TWO = {"a.weight": torch.ones(2)}, {"b.weight": torch.zeros(3)}


def names(path):
    return sorted(read_weights(path))


def test_a_file_of_safetensors(tmp_path):
    """A safetensors file is read with the names and values as saved."""
    save_file(ONE | TWO, tmp_path / "net.safetensors")
    found = read_weights(tmp_path / "net.safetensors")
    assert torch.equal(found["a.weight"], ONE["a.weight"])
    assert sorted(found) == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ONE | TWO, ["a.weight", "b.weight"]),
        ({"state_dict": ONE, "epoch": 3, "optimizer": {"state": {}}}, ["a.weight"]),
        ({"model": ONE | TWO, "args": ["x"]}, ["a.weight", "b.weight"]),
        ({"format": 1, "modules": {"g": ONE, "d": TWO}}, ["d.b.weight", "g.a.weight"]),
    ],
)
def test_files_of_torch_save(tmp_path, content, expected):
    """A state_dict is read from torch.save, within a training's state, or in our checkpoint."""
    torch.save(content, tmp_path / "net.pt")
    assert names(tmp_path / "net.pt") == expected


def test_a_file_of_torch_save_from_before_1_6(tmp_path):
    """A torch.save file from before 1.6, which is no archive, is read."""
    torch.save(ONE, tmp_path / "net.pth", _use_new_zipfile_serialization=False)
    assert names(tmp_path / "net.pth") == ["a.weight"]


def test_a_folder_with_one_file(tmp_path):
    """A folder with one file of any name is read, as Hugging Face saves it."""
    save_file(ONE, tmp_path / "any.safetensors")
    assert names(tmp_path) == ["a.weight"]
    save_file(TWO, tmp_path / "model.safetensors")
    assert names(tmp_path) == ["b.weight"]


def write_index(folder, shards):
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_folder_with_shards(tmp_path):
    """A folder of sharded weights is read by its index."""
    save_file(ONE, tmp_path / "model-1-of-2.safetensors")
    save_file(TWO, tmp_path / "model-2-of-2.safetensors")
    write_index(
        tmp_path,
        {"a.weight": "model-1-of-2.safetensors", "b.weight": "model-2-of-2.safetensors"},
    )
    assert names(tmp_path) == ["a.weight", "b.weight"]
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-2-of-2.safetensors does not exist"):
        read_weights(tmp_path)


@pytest.mark.parametrize("shard", ["../net.safetensors", "/etc/passwd", 3, "a/b.safetensors"])
def test_an_index_leads_out_of_its_folder_never(tmp_path, shard):
    """Only files in the index's own folder are read."""
    save_file(ONE, tmp_path / "net.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_index(folder, {"a.weight": shard})
    with pytest.raises(WeightsError, match="allowed: files beside it"):
        read_weights(folder)


class Evil:
    """A class that would run code if a pickle was trusted."""

    def __reduce__(self):
        return (print, ("it ran",))


def write_evil(path):
    torch.save({"a": Evil()}, path)


def cut(path):
    save_file(ONE, path)
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("none.pt", lambda path: None, "does not exist"),
        ("net.pt", write_evil, "could run code"),
        ("net.pt", lambda path: path.write_bytes(b"text"), "cannot be read"),
        ("net.pt", lambda path: torch.save({"epoch": 3}, path), "no weights by their names"),
        ("net.pt", lambda path: torch.save([1], path), "no weights by their names"),
        ("net.pt", lambda path: path.write_bytes(b""), "cannot be read"),
        (
            "net.pt",
            lambda path: path.write_bytes(b"\x80\x02cos\nsystem\n."),
            "no file of torch.sav",
        ),
        ("net.safetensors", cut, "cut short or not a .safetensors"),
        ("net.safetensors", lambda path: path.write_bytes(b"{}"), "cut short or not"),
        ("net.onnx", lambda path: path.write_bytes(b""), "no file of weights; allowed: .safet"),
        ("folder", lambda path: path.mkdir(), "0 files .safetensors"),
    ],
)
def test_invalid_files_are_explained(tmp_path, capsys, name, write, message):
    """The error for an invalid file names it and the problem, and no code in it runs."""
    write(tmp_path / name)
    with pytest.raises(WeightsError, match=message) as raised:
        read_weights(tmp_path / name)
    assert name in str(raised.value)
    assert "it ran" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none(tmp_path, text):
    """The error for an invalid index names it."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="not an index of shards"):
        read_weights(tmp_path)
