"""The wheel's list of packages, which its flat folder makes necessary."""

import tomllib
from pathlib import Path

import halfstep


def test_the_wheel_has_every_package() -> None:
    """Each folder with an __init__.py is listed."""
    folder = Path(halfstep.__file__).parent
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    found = {path.parent.relative_to(folder.parent) for path in folder.rglob("__init__.py")}
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(str(each).replace("/", ".") for each in found)
