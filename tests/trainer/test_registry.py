import json
import sys

import jsonschema
import pytest
from msgspec import to_builtins

from tests import warm
from trainer import probe
from trainer.registry import (
    MissingRequirementError,
    UnknownRecipeError,
    list_recipes,
    load_recipe,
)

OWN_RECIPE = """
from tests.trainer.conftest import Regression

class Mine(Regression):
    name = "mine"
    title = "My own"

class NotARecipe:
    pass
"""


@pytest.fixture
def own_file(tmp_path):
    """A user's file that defines a recipe."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_RECIPE)
    return path


def test_recipes_that_come_along_are_registered():
    """Built-in recipes are found by entry points, as third-party ones are."""
    assert {"digits", "mlp"} <= set(list_recipes())
    assert load_recipe("digits").title == "Handwritten digits"


def test_a_recipe_is_loaded_from_a_file(own_file):
    """A recipe is loaded by a file's path and a class name."""
    assert load_recipe(f"{own_file}:Mine").title == "My own"


def test_an_unknown_recipe_gets_the_known_names(own_file):
    """The error for an unknown recipe lists the known ones."""
    with pytest.raises(
        UnknownRecipeError,
        match='no recipe "digit"; allowed: digits, erfnet, finetune, gpt, images',
    ):
        load_recipe("digit")
    with pytest.raises(UnknownRecipeError, match='has no class "Yours"'):
        load_recipe(f"{own_file}:Yours")
    with pytest.raises(UnknownRecipeError, match="not a subclass"):
        load_recipe(f"{own_file}:NotARecipe")


def test_a_listed_recipe_that_is_not_there_says_why(tmp_path, monkeypatch):
    """The error for a missing recipe that is listed does not list it as known."""
    file = tmp_path / "gone.py"
    monkeypatch.setenv("HALFSTEP_RECIPES", f"{file}:Gone, digitz")
    with pytest.raises(UnknownRecipeError, match=f"cannot be loaded: there is no file {file}$"):
        load_recipe(f"{file}:Gone")
    with pytest.raises(UnknownRecipeError, match='no recipe "digitz"; allowed:') as result:
        load_recipe("digitz")
    assert str(result.value).count("digitz") == 1


@pytest.mark.slow
def test_the_probe_prints_devices_recipes_and_versions():
    """The probe prints devices, recipes and versions as one JSON object."""
    ended = warm.run([sys.executable, "-m", "trainer.probe"])
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["devices"][0].keys() == {
        "kind", "index", "name", "memory_bytes", "compute_capability", "fp16", "bf16",
        "tf32", "fp8",
    }  # fmt: skip
    assert answer["devices"][0]["memory_bytes"] > 2**28
    assert {"python", "torch", "cuda", "numpy", "torchao"} == answer["versions"].keys()
    recipes = {recipe["name"]: recipe for recipe in answer["recipes"]}
    jsonschema.validate({"training": {"steps": 5}}, recipes["digits"]["schema"])


@pytest.mark.slow
def test_a_broken_recipe_does_not_hide_the_others(monkeypatch, tmp_path, own_file):
    """A broken recipe is offered with its error and location, and the others by their names."""
    broken, unread = tmp_path / "broken.py", tmp_path / "unread.py"
    broken.write_text("\n1 / 0")
    unread.write_text("a = 1\nb = (\n")
    monkeypatch.setenv("HALFSTEP_RECIPES", f"{broken}:Gan, {own_file}:Mine,{unread}")
    recipes = {recipe["name"]: recipe for recipe in to_builtins(probe.recipes())}
    result = recipes[f"{broken}:Gan"]
    assert result["error"] == "ZeroDivisionError: division by zero"
    assert (result["place"], result["file"]) == ("broken.py:2", str(broken))
    assert recipes[str(unread)]["error"].startswith("SyntaxError")
    assert recipes[str(unread)]["place"] == "unread.py:2"
    mine = recipes["mine"]
    assert (mine["title"], mine["reference"], mine["check"]) == (
        "My own",
        f"{own_file}:Mine",
        None,
    )
    assert "schema" in recipes["digits"]
    assert recipes["digits"]["package"].startswith("halfstep-service ")


@pytest.mark.slow
def test_a_declared_name_is_unique(monkeypatch, tmp_path, own_file):
    """The second of two recipes with one name is listed by its file; an invalid name is
    reported.
    """
    taken, nameless = tmp_path / "taken.py", tmp_path / "nameless.py"
    taken.write_text(OWN_RECIPE.replace('"mine"', '"digits"'))
    nameless.write_text(OWN_RECIPE.replace('"mine"', '"a name, with a comma"'))
    monkeypatch.setenv("HALFSTEP_RECIPES", f"{taken}:Mine,{own_file},{own_file}:Mine,{nameless}")
    recipes = {recipe["name"]: recipe for recipe in to_builtins(probe.recipes())}
    assert recipes["digits"]["title"] == "Handwritten digits"
    assert recipes[f"{taken}:Mine"]["title"] == "My own"
    assert recipes["mine"]["reference"] == str(own_file)
    assert recipes[f"{own_file}:Mine"]["title"] == "My own"
    result = recipes[str(nameless)]["error"]
    assert result.startswith("ValueError: Mine.name is 'a name, with a comma'; allowed: 1 to 64")


def test_a_list_that_cannot_be_read_hides_nothing(monkeypatch, tmp_path):
    """An unreadable list of recipes is listed as an error."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))
    (tmp_path / "recipes.json").write_text('{"recipes": [{"reference": 1}]}')
    recipes = {recipe["name"]: recipe for recipe in to_builtins(probe.recipes())}
    assert "holds a reference that is not a text" in recipes[f"{tmp_path}/recipes.json"]["error"]
    assert "schema" in recipes["digits"]


@pytest.fixture
def lacking(tmp_path, monkeypatch):
    """A distribution with two recipes, of which one lacks its extra."""
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    requires = "".join(
        f"Requires-Dist: {each}\n"
        for each in ('numpy>=1; extra == "big"', 'Nobody.has-this~=2.0; extra == "big"', "alembic")
    )
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n{requires}")
    (folder / "entry_points.txt").write_text(
        "[halfstep.recipes]\nbig = tests.no_such_module:Big [big]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_recipe_with_missing_packages_names_them(lacking):
    """A recipe with missing packages is not imported; the message names them and the command."""
    result = r"recipe big needs Nobody.has-this: pip install 'mine\[big\]'"
    with pytest.raises(MissingRequirementError, match=result):
        load_recipe("big")


def test_a_recipe_whose_packages_are_missing_is_not_offered(lacking):
    """A recipe without its packages is listed with its requirements, without a schema."""
    recipes = {recipe["name"]: recipe for recipe in to_builtins(probe.recipes())}
    assert recipes["big"] == {
        "name": "big",
        "reference": "big",
        "package": "mine 1.0",
        "needs": "Nobody.has-this: pip install 'mine[big]'",
    }
    assert "schema" in recipes["digits"]


@pytest.mark.parametrize(
    ("text", "error", "line"),
    [
        ("a = 1\n1 / 0\n", "ZeroDivisionError: division by zero", 2),
        ("def start():\n    raise SystemExit(3)\n\nstart()", "SystemExit: 3", 2),
        ("\n\na = (\n", "SyntaxError: '(' was never closed", 3),
    ],
)
def test_an_installed_recipe_that_raises_harms_no_other(tmp_path, monkeypatch, text, error, line):
    """An installed recipe that raises is reported with package, error and line, and hides no
    other.
    """
    folder = tmp_path / "fallen-2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fallen\nVersion: 2.1\n")
    (folder / "entry_points.txt").write_text("[halfstep.recipes]\nfallen = fallen.recipe:Mine\n")
    package = tmp_path / "fallen"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "recipe.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fallen", raising=False)
    offered = {recipe["name"]: recipe for recipe in to_builtins(probe.recipes())}
    result = offered.pop("fallen")
    assert result.pop("error").startswith(error)
    assert result == {
        "name": "fallen",
        "reference": "fallen",
        "package": "fallen 2.1",
        "place": f"recipe.py:{line}",
    }
    assert {"digits", "mlp"} <= {name for name, recipe in offered.items() if "schema" in recipe}
    assert load_recipe("digits").title == "Handwritten digits"
