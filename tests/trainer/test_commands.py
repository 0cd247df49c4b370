"""The commands about recipes, as a person types them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.site import halfstep
from trainer import kept_recipes

TEMPLATE = Path(__file__).parents[2] / "docs" / "recipe_template.py"


def test_recipe_check_from_the_command() -> None:
    """The template passes, and a file that is not there is named."""
    assert halfstep("recipe", "check", str(TEMPLATE)).returncode == 0
    assert "nowhere.py" in halfstep("recipe", "check", "nowhere.py").stderr


def test_recipe_train_beside_files_of_our_modules_names(tmp_path: Path) -> None:
    """The command that is installed does not look for its own modules where it is typed."""
    for name in ("trainer", "app", "db", "worker"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not mine')")
    words = ["recipe", "train", str(TEMPLATE), "--precision", "fp32", "--set", "training.steps=2"]
    command = [Path(sys.executable).parent / "halfstep", *words]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (trained.returncode, trained.stderr) == (0, "")
    assert trained.stdout.splitlines()[-1] == "finished after 2 steps"
    explained = halfstep("recipe", "train", "mlp", "--help").stdout
    assert explained.startswith("usage: halfstep recipe train")
    assert "recipe.width" in explained


def test_recipes_are_kept_with_what_the_check_says(tmp_path, monkeypatch):
    """One that is added is listed with its class, checked, and told to be outdated once changed."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    file = tmp_path / "mine.py"
    text = TEMPLATE.read_text().replace('return {"val/r2": 1 - unexplained.item()}', "return {}")
    file.write_text(text)
    data = {"HALFSTEP_DATA": str(tmp_path)}
    added = halfstep("recipe", "add", str(file), **data)
    assert added.returncode == 0, added.stderr
    reference = f"{file}:Diabetes"
    assert f"{reference} is kept" in added.stdout
    written = (tmp_path / "recipes.json", tmp_path / ".recipes.lock")
    assert [each.stat().st_mode & 0o777 for each in written] == [0o600, 0o600]
    check = kept_recipes.check_of(reference)
    assert [(each["severity"], each["text"][:27]) for each in check["findings"]] == [
        ("warning", "evaluate returns no metrics")
    ]
    assert not check["is_outdated"]
    file.write_text(text + "\n# changed\n")
    listed = halfstep("recipe", "list", **data).stdout
    assert f"{reference}  0 errors and 1 warnings, before the file was changed" in listed
    assert "kept no longer" in halfstep("recipe", "remove", str(file), **data).stdout
    assert kept_recipes.read() == []
    again = halfstep("recipe", "remove", str(file), **data)
    assert (again.returncode, again.stderr) == (
        1,
        f"halfstep: {file} is not kept; kept are: none\n",
    )


def test_what_cannot_be_loaded_is_not_kept(tmp_path, monkeypatch):
    """The file, the exception and the line are told; so is a data folder that is not there."""
    data = {"HALFSTEP_DATA": str(tmp_path)}
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\n\nraise RuntimeError('no such thing')\n")
    told = halfstep("recipe", "add", str(broken), **data)
    assert told.returncode == 1
    assert f"{broken} cannot be offered: broken.py:3: RuntimeError: no such thing" in told.stderr
    assert not (tmp_path / "recipes.json").exists()
    checked = halfstep("recipe", "check", str(broken))
    assert (checked.returncode, checked.stderr) == (1, told.stderr)
    nameless = tmp_path / "nameless.py"
    nameless.write_text(TEMPLATE.read_text().replace('"diabetes"', '"two words"'))
    told = halfstep("recipe", "add", str(nameless), **data)
    assert "Diabetes.name is 'two words'; allowed: 1 to 64 letters" in told.stderr
    nowhere = halfstep("recipe", "add", str(TEMPLATE), HALFSTEP_DATA=str(tmp_path / "nowhere"))
    assert f"there is no data folder {tmp_path}/nowhere" in nowhere.stderr
    assert "is no file of Python" in halfstep("recipe", "add", "digits", **data).stderr


def test_a_list_of_recipes_has_an_end(tmp_path, monkeypatch):
    """More than can be shown are refused, and one file stands there once."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    monkeypatch.setattr(kept_recipes, "MOST", 2)
    for name in ("/a.py:One", "/a.py:Other", "/b.py:One"):
        kept_recipes.add(name)
    assert [each["reference"] for each in kept_recipes.read()] == ["/a.py:Other", "/b.py:One"]
    with pytest.raises(kept_recipes.NotKeptError, match="2 recipes are kept; allowed: 2 at most"):
        kept_recipes.add("/c.py:One")
    with pytest.raises(kept_recipes.NotKeptError, match=r"kept are: /a.py:Other, /b.py:One"):
        kept_recipes.remove("/a.py:One")
    assert kept_recipes.remove("/a.py") == ["/a.py:Other"]
