"""Paths in configurations."""

import os
from pathlib import Path

import pytest

from halfstep.recipe import ConfigError, data_path


def test_a_path_is_resolved_and_rejected_outside_allowed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System and service paths are rejected, and with configured roots all paths outside of
    them.
    """
    for name in ("service", "texts", "other", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HALFSTEP_PRIVATE_PATHS", os.pathsep.join([f"{tmp_path}/service", "/a.db"]))
    (tmp_path / "texts" / "out").symlink_to(tmp_path / "service" / "runs")
    (tmp_path / "other" / "in").symlink_to(tmp_path / "texts")
    refused = ["/proc/self/environ", "/proc/1/environ", "/sys/kernel", "/dev/mem", "/a.db"]
    for path in (*refused, f"{tmp_path}/service/halfstep.db", f"{tmp_path}/texts/out"):
        with pytest.raises(ConfigError, match=f"recipe.text is '{path}': runs may not read it"):
            data_path(path, "recipe.text")
    assert data_path(f"{tmp_path}/other/in", "recipe.text") == tmp_path / "texts"
    assert data_path("/etc/hostname", "recipe.text") == Path("/etc/hostname")
    monkeypatch.setenv("HALFSTEP_DATA_ROOTS", f"{tmp_path}/texts{os.pathsep}/nowhere")
    for path in (f"{tmp_path}/other/in", f"{tmp_path}/texts/a.txt", f"{tmp_path}/tmp/drawn"):
        data_path(path, "recipe.text")
    for path in ("/etc/passwd", f"{tmp_path}/texts-2", f"{tmp_path}/texts/../other"):
        with pytest.raises(ConfigError, match=rf"allowed on this worker: below {tmp_path}/texts, "):
            data_path(path, "recipe.text")
    with pytest.raises(ConfigError, match=r"recipe.text is 'a.x00b'"):
        data_path("a\0b", "recipe.text")
