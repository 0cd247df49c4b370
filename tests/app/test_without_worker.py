"""An installation of the server without the extra `worker`, and so without torch."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import files
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", each)[0] for each in requirements}


def run_without_worker(code: str) -> str:
    """Run code without the packages of the worker extra; return its output."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    only = names(project["optional-dependencies"]["worker"]) - names(project["dependencies"])
    found = [file for name in only for file in files(name) or () if file.suffix == ".py"]
    modules = sorted({file.parts[0].removesuffix(".py") for file in found})
    assert {"torch", "sklearn", "psutil"} <= set(modules)
    block = f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"
    return subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.extended
def test_server_and_database_need_nothing_of_the_extra() -> None:
    """Every module of `app` and `db` can be imported without the extra `worker`."""
    code = """
import app, db
from importlib import import_module
from pkgutil import walk_packages
for package in (app, db):
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        print(import_module(module.name).__name__)
"""
    assert {"app.main", "app.serve", "db.database"} <= set(run_without_worker(code).split())


def test_the_start_of_a_server_loads_no_package_that_few_requests_need() -> None:
    """A server starts without packages that few requests need, each of which costs a tenth to half
    a second and megabytes.
    """
    packages = {"optuna", "psycopg", "pyarrow", "scipy", "uvicorn"}
    code = f"import sys, app.serve; print(*{packages} & {{*sys.modules}})"
    assert run_without_worker(code).split() == ["uvicorn"]


@pytest.mark.extended
def test_help_names_missing_packages_of_the_worker() -> None:
    """Without the extra `worker` the help of server commands works, and that of worker commands
    names the missing packages.
    """
    text = run_without_worker("from halfstep.cli.main import main; main(['--help'])")
    text = re.sub(r"\s+", " ", text)
    assert "server Start only the server" in text
    assert re.search(r"worker needs \w+, which is not installed here", text)
