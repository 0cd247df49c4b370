"""A fixture for imports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.site import type_command

Import = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Import:
    """Run `halfstep import`; return its message on each run. code: its exit code."""

    def type_it(source: str, path: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
        folder = str(tmp_path / "halfstep")
        options = ("--folder", folder, "--offline", "--json", *words)
        assert type_command("import", source, str(path), *options) == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return type_it
