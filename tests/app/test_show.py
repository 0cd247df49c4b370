"""`halfstep show`: a folder of watched runs in the browser."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests import warm
from tests.site import SECONDS, halfstep, heed, until

pytestmark = pytest.mark.slow

SCRIPT = """
import halfstep
for name, project in (("first", None), ("second", "vision")):
    with halfstep.watch(name=name, project=project, mode="offline") as watch:
        watch.log({"val/loss": 0.5}, step=1)
"""
GROWING = """
import sys
import halfstep
watch = halfstep.watch(name="growing", mode="offline")
for step, line in enumerate(sys.stdin, 1):
    watch.log({"val/loss": float(line)}, step=step)
"""


@contextmanager
def open_shown(folder: Path) -> Iterator[httpx2.Client]:
    """Run `halfstep show` and yield a browser that is signed in by its link."""
    command = [sys.executable, "-m", "halfstep.cli.main", "show", "--no-open"]
    elsewhere = {**os.environ, "http_proxy": "http://127.0.0.1:9"}  # leads to no address here
    with heed(signal.SIGINT), output_file(folder).open("w") as output:
        process = warm.Popen(command, cwd=folder, stdout=output, env=elsewhere)
    try:
        until(lambda: "Ctrl-C" in output_file(folder).read_text())
        link = re.search(r"http://\S+", output_file(folder).read_text())
        parts = urlsplit(link.group())
        base = f"{parts.scheme}://{parts.netloc}"
        with httpx2.Client(base_url=base, follow_redirects=True, timeout=60) as browser:
            secret = {"token": parts.query.partition("=")[2]}
            for _ in range(2):  # the link stays valid, and needs no press on a button
                assert browser.get("/", params=secret).url.path == "/runs"
            yield browser
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=SECONDS)


def output_file(folder: Path) -> Path:
    """Return the file with the output of `halfstep show` for a folder."""
    return folder / "printed"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(browser: httpx2.Client) -> set[str]:
    """Return the names of the runs in the list."""
    return {run["name"] for run in browser.get("/api/v1/runs").json()["runs"]}


def test_runs_of_a_folder_are_shown_and_cannot_be_changed(tmp_path: Path) -> None:
    """`halfstep show` lists runs of all projects, does not allow changes, and writes no file."""
    (tmp_path / "script.py").write_text(SCRIPT)
    assert warm.run([sys.executable, "script.py"], cwd=tmp_path).returncode == 0
    before = contents(tmp_path / "halfstep-runs")
    with open_shown(tmp_path) as browser:
        until(lambda: names(browser) == {"first", "second"})
        until(lambda: bool(browser.get("/api/v1/runs/1/metrics").json()["metrics"]))
        [point] = browser.get("/api/v1/runs/1/metrics").json()["metrics"]
        assert (point["name"], point["step"], point["value"]) == ("val/loss", 1, 0.5)
        page = browser.get("/runs").text
        for absent in ("/sweeps", "/reports", "/alerts", "/trash", "/storage", "/account"):
            assert f'href="{absent}"' not in page
        assert "Mine" not in page
        page = browser.get("/account").text
        csrf_token = page.partition('name="csrf-token" content="')[2].partition('"')[0]
        changed = browser.patch(
            "/api/v1/runs/1", json={"name": "mine"}, headers={"X-CSRF-Token": csrf_token}
        )
        assert changed.status_code == 403
    assert contents(tmp_path / "halfstep-runs") == before


def test_a_run_grows_while_it_is_shown(tmp_path: Path) -> None:
    """A growing run is updated, a damaged run affects no other, and a folder may come back."""
    (tmp_path / "script.py").write_text(GROWING)
    (tmp_path / "halfstep-runs" / "damaged").mkdir(parents=True)
    (tmp_path / "halfstep-runs" / "damaged" / "run.json").write_text(json.dumps([]))
    script = warm.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdin=subprocess.PIPE, text=True
    )
    runs, away = tmp_path / "halfstep-runs", tmp_path / "away"
    with open_shown(tmp_path) as browser:
        for count in (1, 2):
            script.stdin.write(f"{count}\n")
            script.stdin.flush()
            until(lambda: "growing" in names(browser))
            url = "/api/v1/runs/1/metrics"
            until(lambda url=url, n=count: len(browser.get(url).json()["metrics"]) == n)
            runs.rename(away)
            until(lambda: "No such file" in output_file(tmp_path).read_text())
            away.rename(runs)
        script.communicate()
        until(lambda: browser.get("/api/v1/runs/1").json()["status"] == "finished")


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_folder_without_runs_is_named(tmp_path: Path, name: str) -> None:
    """`halfstep show` of a folder without runs ends with its name before anything starts."""
    ended = halfstep("show", str(tmp_path / name), **os.environ)
    assert ended.returncode == 2
    assert str(tmp_path) in ended.stderr.replace("\n", "").replace(" ", "")
