"""The commands for recipes, run as from a terminal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.site import halfstep
from trainer import registered_recipes

TEMPLATE = Path(__file__).parents[2] / "docs" / "how-to" / "recipe_template.py"


@pytest.mark.slow
def test_recipe_check_from_the_command() -> None:
    """`recipe check` passes the template, and names a missing file."""
    assert halfstep("recipe", "check", str(TEMPLATE)).returncode == 0
    nowhere = halfstep("recipe", "check", "nowhere.py")
    path = Path("nowhere.py").resolve()
    assert (nowhere.returncode, nowhere.stderr) == (1, f"halfstep: there is no file {path}\n")


@pytest.mark.extended
def test_recipe_train_next_to_files_with_names_of_our_modules(tmp_path: Path) -> None:
    """`recipe train` imports no module from the working directory."""
    for name in ("trainer", "app", "db", "worker"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not mine')")
    words = ["recipe", "train", str(TEMPLATE), "--precision", "fp32", "--set", "training.steps=2"]
    command = [Path(sys.executable).parent / "halfstep", *words]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (trained.returncode, trained.stderr) == (0, "")
    assert trained.stdout.splitlines()[-1] == "finished after 2 steps"
    explained = halfstep("recipe", "train", "mlp", "--help").stdout
    assert "Usage: halfstep recipe train" in explained
    assert "recipe.width" in explained


@pytest.mark.slow
def test_recipes_are_kept_with_what_the_check_says(tmp_path, monkeypatch):
    """A registered recipe is listed with class and check result, and marked once changed."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    file = tmp_path / "mine.py"
    text = TEMPLATE.read_text().replace('return {"val/r2": 1 - unexplained.item()}', "return {}")
    file.write_text(text)
    data = {"HALFSTEP_DATA": str(tmp_path)}
    added = halfstep("recipe", "add", str(file), **data)
    assert added.returncode == 0, added.stderr
    reference = f"{file}:Diabetes"
    assert f"{reference} is registered" in added.stdout
    written = (tmp_path / "recipes.json", tmp_path / ".recipes.lock")
    assert [each.stat().st_mode & 0o777 for each in written] == [0o600, 0o600]
    check = registered_recipes.check_of(reference)
    assert [(each["severity"], each["text"][:27]) for each in check["findings"]] == [
        ("warning", "evaluate returns no metrics")
    ]
    assert not check["is_outdated"]
    file.write_text(text + "\n# changed\n")
    listed = halfstep("recipe", "list", **data).stdout
    assert f"{reference}  0 errors and 1 warnings, before the file was changed" in listed
    assert "kept no longer" in halfstep("recipe", "remove", str(file), **data).stdout
    assert registered_recipes.read() == []
    again = halfstep("recipe", "remove", str(file), **data)
    assert (again.returncode, again.stderr) == (
        1,
        f"halfstep: {file} is not registered; registered are: none\n",
    )


@pytest.mark.slow
def test_two_classes_of_a_file_are_kept_and_checked_each(tmp_path, monkeypatch):
    """Two classes of one file are registered and checked separately."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    data = {"HALFSTEP_DATA": str(tmp_path)}
    file = tmp_path / "mine.py"
    other = """

class Other(Diabetes):
    name = "other"

    def evaluate(self):
        return {}
"""
    file.write_text(TEMPLATE.read_text() + other)
    for name in ("Diabetes", "Other"):
        added = halfstep("recipe", "add", f"{file}:{name}", **data)
        assert added.returncode == 0, added.stderr
    found = {}
    for each in registered_recipes.read():
        findings = registered_recipes.check_of(each["reference"])["findings"]
        found[each["reference"]] = [finding["text"][:27] for finding in findings]
    assert found == {f"{file}:Diabetes": [], f"{file}:Other": ["evaluate returns no metrics"]}
    assert halfstep("recipe", "check", f"{file}:Diabetes", **data).returncode == 0
    assert registered_recipes.check_of(f"{file}:Other")["findings"] != []


@pytest.mark.slow
def test_what_cannot_be_loaded_is_not_kept(tmp_path, monkeypatch):
    """A recipe that cannot be loaded is not registered; file, exception and line are printed."""
    data = {"HALFSTEP_DATA": str(tmp_path)}
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\n\nraise RuntimeError('no such thing')\n")
    result = halfstep("recipe", "add", str(broken), **data)
    assert result.returncode == 1
    assert f"{broken} cannot be offered: broken.py:3: RuntimeError: no such thing" in result.stderr
    assert not (tmp_path / "recipes.json").exists()
    checked = halfstep("recipe", "check", str(broken))
    assert (checked.returncode, checked.stderr) == (1, result.stderr)
    nameless = tmp_path / "nameless.py"
    nameless.write_text(TEMPLATE.read_text().replace('"diabetes"', '"two words"'))
    result = halfstep("recipe", "add", str(nameless), **data)
    assert "Diabetes.name is 'two words'; allowed: 1 to 64 letters" in result.stderr
    nowhere = halfstep("recipe", "add", str(TEMPLATE), HALFSTEP_DATA=str(tmp_path / "nowhere"))
    assert f"there is no data folder {tmp_path}/nowhere" in nowhere.stderr
    assert "is no file of Python" in halfstep("recipe", "add", "digits", **data).stderr


@pytest.mark.slow
def test_a_recipe_that_fails_the_check_is_not_registered(tmp_path):
    """After errors in the check or invalid settings, the list of recipes is unchanged."""
    data = {"HALFSTEP_DATA": str(tmp_path)}
    typo = tmp_path / "typo.py"
    typo.write_text(TEMPLATE.read_text().replace("torch.tensor(", "torch.tensr(", 1))
    result = halfstep("recipe", "add", str(typo), **data)
    assert result.returncode == 1
    assert "AttributeError" in result.stdout
    assert "is registered" not in result.stdout
    assert (
        f"{typo}:Diabetes is not added: the check found 1 error; --no-check adds" in result.stderr
    )
    wrong = halfstep("recipe", "add", str(TEMPLATE), "--set", "nope=1", **data)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "nope" in wrong.stderr
    both = halfstep("recipe", "add", str(TEMPLATE), "--no-check", "--set", "x=1", **data)
    assert both.returncode == 2
    assert "--set x=1 is only for the check" in both.stderr
    assert not (tmp_path / "recipes.json").exists()
    assert halfstep("recipe", "add", str(typo), "--no-check", **data).returncode == 0
    assert (tmp_path / "recipes.json").exists()


@pytest.mark.extended
@pytest.mark.slow
def test_a_recipe_with_a_taken_name_is_reported(tmp_path):
    """A recipe with another's name is offered by its path, and keeps it when registered again."""
    data = {"HALFSTEP_DATA": str(tmp_path)}
    first, second, third = (tmp_path / f"{name}.py" for name in ("first", "second", "third"))
    for file in (first, second):
        file.write_text(TEMPLATE.read_text())
    third.write_text(TEMPLATE.read_text().replace('"diabetes"', '"digits"'))
    said = [
        halfstep("recipe", "add", str(file), "--no-check", **data).stdout.strip()
        for file in (first, second, first, third)
    ]
    assert said[0].endswith("offer it soon, as diabetes.")
    assert f"as {second}:Diabetes. The name diabetes is that of {first}:Diabetes:" in said[1]
    assert said[2] == said[0]
    assert "The name digits is that of a built-in recipe:" in said[3]
    result = halfstep("recipe", "add", str(second), "--no-check", "--json", **data)
    reference = f"{second}:Diabetes"
    assert json.loads(result.stdout) == {
        "reference": reference,
        "kept_in": str(tmp_path / "recipes.json"),
        "name": reference,
        "name_taken_by": f"{first}:Diabetes",
    }


def test_a_list_of_recipes_has_an_end(tmp_path, monkeypatch):
    """The number of registered recipes is limited; two classes of a file count as two."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    monkeypatch.setattr(registered_recipes, "MOST", 2)
    for name in ("/a.py:One", "/a.py:Other", "/a.py:One"):
        registered_recipes.add(name)
    assert [each["reference"] for each in registered_recipes.read()] == ["/a.py:One", "/a.py:Other"]
    with pytest.raises(
        registered_recipes.NotRegisteredError, match="2 recipes are registered; allowed: 2 at most"
    ):
        registered_recipes.add("/c.py:One")
    with pytest.raises(
        registered_recipes.NotRegisteredError, match=r"registered are: /a.py:One, /a.py:Other"
    ):
        registered_recipes.remove("/a.py:Third")
    assert registered_recipes.remove("/a.py:One") == ["/a.py:One"]
    registered_recipes.add("/a.py:One")
    assert registered_recipes.remove("/a.py") == ["/a.py:Other", "/a.py:One"]
