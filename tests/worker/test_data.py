"""Unreadable or slow data: messages on a run's page and in the API."""

import os
import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from db.tables import ENDED, Status
from tests.app.conftest import app, browser, settings
from tests.site import Site, until

__all__ = ["app", "browser", "settings"]

RECIPES = """
import os
import signal

from tests.reading import Noisy, Reading


class Torn(Noisy):
    def __getitem__(self, index):
        if index == 20:
            raise OSError("image 20 is truncated")
        return super().__getitem__(index)


class Deadly(Noisy):
    def __getitem__(self, index):
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Slow(Noisy):
    def __getitem__(self, index):
        if index == 20:
            with open(os.environ["HALFSTEP_TEST_GATE"], "rb") as gate:
                gate.read()
        return super().__getitem__(index)


class ReadingTorn(Reading):
    name, made = "torn", Torn


class ReadingDeadly(Reading):
    name, made = "deadly", Deadly


class ReadingSlow(Reading):
    name, made = "slow", Slow
"""


@pytest.fixture
def recipes(tmp_path: Path) -> str:
    """A file of recipes with faulty data."""
    path = tmp_path / "recipes.py"
    path.write_text(RECIPES)
    return str(path)


def submit(site: Site, recipe: str, **data: float) -> int:
    """Queue a run that reads its examples in order with one data worker."""
    training = {"steps": 8, "batch_size": 4, "shuffle": False}
    config = {"precision": "fp32", "training": training, "data": {"workers": 1, **data}}
    return site.submit(recipe=recipe, config=config)


def page(browser: TestClient, run_id: int) -> str:
    """Return the text of a run's page."""
    html = browser.get(f"/runs/{run_id}").raise_for_status().text
    return unescape(re.sub(r"<[^>]*>", "", html))


@pytest.mark.parametrize(
    ("kind", "why", "traceback"),
    [
        (
            "Torn",
            r"example 20 cannot be read \(Torn\): OSError: image 20 is truncated",
            'raise OSError("image 20 is truncated")',
        ),
        (
            "Deadly",
            r"data worker 0 \(process \d+, at example 20\) was killed by SIGKILL",
            "Traceback (most recent call last):",
        ),
    ],
    ids=["raised", "killed"],
)
def test_the_end_of_a_data_worker_is_on_the_runs_page(
    site: Site, browser: TestClient, recipes: str, kind: str, why: str, traceback: str
) -> None:
    """After a data worker fails, page and API have the example's index and the traceback."""
    recipe = f"{recipes}:Reading{kind}"
    run_id = submit(site, recipe)
    with site.worker(HALFSTEP_RECIPES=recipe):
        assert site.wait(run_id).status == Status.FAILED
    result = browser.get(f"/api/v1/runs/{run_id}").json()
    last = result["statuses"][-1]
    assert (last["status"], last["failure_kind"]) == ("failed", "code")
    assert re.search(why, last["reason"])
    for text in (result["error"], page(browser, run_id)):
        assert re.search(why, text)
        assert traceback in text


def test_a_run_that_waits_for_its_data_says_so_on_its_page(
    site: Site, browser: TestClient, recipes: str, tmp_path: Path
) -> None:
    """While a run waits for data its page has the duration, the example and the worker's stack."""
    gate, recipe = tmp_path / "gate", f"{recipes}:ReadingSlow"
    os.mkfifo(gate)
    run_id = submit(site, recipe, wait_seconds=0.2)
    with site.worker(HALFSTEP_RECIPES=recipe, HALFSTEP_TEST_GATE=str(gate)):
        until(lambda: 'recipes.py", line' in page(browser, run_id))
        waiting = page(browser, run_id)
        lines = browser.get(f"/api/v1/runs/{run_id}/log").json()["log"]
        assert site.run(run_id).status not in ENDED
        gate.write_bytes(b"")
        ended = site.wait(run_id)
    assert (ended.status, ended.step) == (Status.FINISHED, 8)
    for text in (waiting, "\n".join(line["text"] for line in lines)):
        assert re.search(r"waited [\d.]+ m?s for a batch \(data.wait_seconds is 0.2\)", text)
        assert re.search(r"data worker 0 \(process \d+, at example 20\):", text)
        assert re.search(r"Stack \(most recent call first\):\s+File .*recipes.py., line", text)
