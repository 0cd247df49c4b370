"""Restores torch after each framework, and prints the frameworks' versions."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest

from halfstep.session import active_run

PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "fastai",
    "hydra-core",
    "keras",
    "lightning",
    "monai",
    "optuna",
    "pytorch-ignite",
    "skorch",
    "stable-baselines3",
    "timm",
    "torch-geometric",
    "transformers",
    "trl",
    "ultralytics",
)


def pytest_report_header() -> str:
    """Return the installed versions."""
    return "frameworks: " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End each test's run, and send none to a local server."""
    monkeypatch.setenv("HALFSTEP_MODE", "offline")
    yield
    if active_run.active is not None:
        active_run.active.finish()
