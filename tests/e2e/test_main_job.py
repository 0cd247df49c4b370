"""The main job end to end, with a real browser, server, worker and training."""

import hashlib
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

from db.access import accounts
from db.database import Database
from db.settings import Settings
from db.tables import Status, User
from halfstep.run_config import parse_config
from tests.browser import DRAWN, STATUS, open_tab
from tests.site import GATED, Site, until
from trainer.checkpoints.checkpoint import load
from trainer.evaluation import evaluate
from trainer.recipes.digits import Digits
from trainer.step import make_autocast

PATIENCE = 90_000  # milliseconds, for a slow machine


@pytest.fixture
def settings(site: Site) -> Settings:
    """Settings with the worker's data folder and database."""
    return Settings(data=site.data, database_url=site.url)


@pytest.mark.journey
def test_submit_watch_and_download(
    site: Site, database: Database, ada: User, page: Page, tmp_path: Path
) -> None:
    """A new user signs in, submits digits, sees it train and skip, and downloads weights."""
    with database.writing() as session:
        token = accounts.make_link_token(session, ada)
    page.context.clear_cookies()
    page.goto(f"/?token={token}")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/runs")
    with site.start_gated_worker():
        until(lambda: site.offers(GATED))
        page.get_by_role("link", name="New run").first.click()
        page.get_by_role("link", name="Gated digits").click()
        page.locator('[name="training.steps"]').fill("200")
        page.get_by_role("button", name="Start run").click()
        page.wait_for_url("**/runs/1")
        status = page.locator(STATUS)

        # The line grows while the run is running.
        expect(status).to_have_text("Running", timeout=PATIENCE)
        until(lambda: page.evaluate(DRAWN) > 0)
        drawn = page.evaluate(DRAWN)
        until(lambda: page.evaluate(DRAWN) > drawn)
        assert site.run(1).status == Status.RUNNING
        expect(page.locator("[data-skip-count]")).to_contain_text("skipped")
        site.open_gate()

        expect(status).to_have_text("Finished", timeout=PATIENCE)
    run = site.run(1)
    until(lambda: page.evaluate(DRAWN) == 200)
    expect(page.locator("[data-skip-count]")).to_have_text(f"{run.skipped} skipped steps")
    expect(page.locator("[data-fact=skipped]")).to_have_text(str(run.skipped))
    expect(page.locator("#tab-skips [data-fragment=skip_count]")).to_have_text(str(run.skipped))
    assert site.count_steps(1) == 200
    assert run.skipped > 0
    ticks = page.evaluate(f"{FIGURE}.data.find(t => t.name === 'skipped').x.length")
    # Closer than a pixel they are one, with their number.
    assert 0 < ticks <= run.skipped
    shown = float(page.locator('[data-metric="val/accuracy"]').inner_text())

    open_tab(page, "Files")
    expect(page.locator(".checkpoints tr", has_text="whole state")).to_be_in_viewport(ratio=1)
    with page.expect_download() as started:
        page.locator(".checkpoints tr", has_text="whole state").get_by_text("Download").click()
    download = started.value
    assert download.suggested_filename.endswith("gated-fp16-run1-step200.pt")
    path = tmp_path / download.suggested_filename
    download.save_as(path)
    row = page.locator(".checkpoints tr", has_text="whole state")
    digest = row.get_by_role("button", name="Copy SHA-256")
    assert digest.get_attribute("title") == hashlib.sha256(path.read_bytes()).hexdigest()
    assert validation_accuracy(path) == pytest.approx(shown, abs=5e-4)


FIGURE = "document.querySelector('[data-plot]')"


def validation_accuracy(path: Path) -> float:
    """Load a checkpoint with plain torch and evaluate it."""
    torch.set_num_threads(1)
    state = torch.load(path, weights_only=True)
    assert state["recipe"] == "gated"
    assert load(path)["progress"] == state["progress"]
    config = parse_config(Digits, state["config"])
    recipe = Digits(config, torch.device("cpu"))
    for name, module in recipe.modules.items():
        module.load_state_dict(state["modules"][name])
    return evaluate(recipe, make_autocast(config, torch.device("cpu")))["val/accuracy"]
