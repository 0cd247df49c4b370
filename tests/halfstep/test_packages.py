"""The list of packages in the wheel, which the flat folder layout requires."""

import sys
import tomllib
from pathlib import Path

import pytest

import halfstep


def test_the_wheel_has_every_package() -> None:
    """Each folder with an __init__.py is in the wheel's list of packages."""
    folder = Path(halfstep.__file__).parent
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    found = {path.parent.relative_to(folder.parent) for path in folder.rglob("__init__.py")}
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(str(each).replace("/", ".") for each in found)


@pytest.mark.parametrize(
    ("adapter", "module", "package"),
    [("optuna", "optuna", "optuna"), ("hydra", "hydra", "hydra-core")],
)
def test_a_missing_framework_is_named_with_its_package(
    adapter: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a missing framework has the command that installs it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"halfstep.{adapter}", raising=False)
    monkeypatch.delitem(vars(halfstep), adapter, raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}$"):
        getattr(halfstep, adapter)
