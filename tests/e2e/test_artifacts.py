"""Artifacts of recipes and scripts in a real browser."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from db.access import accounts
from db.database import Database
from db.runs import runs
from db.settings import Settings
from db.tables import Run, User
from tests import warm
from tests.browser import DRAWN, LINES, STATUS, open_tab, wait_until
from tests.e2e.artifacts_made import FILES, PICTURE, publish
from tests.site import until


@pytest.mark.journey
def test_artifacts_come_onto_the_page_and_are_downloaded(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """Texts and images appear on the open page as such, and can be downloaded."""
    page.goto("/runs/1#artifacts")
    expect(page.locator("[data-fragment=artifacts]")).to_contain_text("None")
    for name, body in FILES.items():
        publish(settings, database, running, name, body)
    rows = page.locator(".files tbody tr")
    expect(rows).to_have_count(2)
    for name, body in FILES.items():
        with page.expect_download() as started:
            rows.get_by_role("link", name=f"Download {name} of step 100").click()
        assert started.value.suggested_filename.endswith(name)
        assert started.value.path().read_bytes() == body
    open_tab(page, "Media")
    picture, text = (
        page.get_by_role("region", name=name, exact=True) for name in ("grid", "samples.txt")
    )
    expect(text.locator("pre")).to_have_text("ROMEO: <b>What light?</b>")
    wait_until(page, "document.querySelector('.shots img')?.naturalWidth === 1")
    publish(settings, database, running, "grid.png", PICTURE, step=200)
    expect(picture.locator("output")).to_have_text("step 200")  # it was at the end
    picture.get_by_role("slider").press("ArrowLeft")
    expect(picture.locator("output")).to_have_text("step 100")
    expect(text.locator("pre")).to_contain_text("What light?")


#: Trains until it is let end; the fifth step overflows.
SCRIPT = """
import time, torch
from pathlib import Path
import halfstep

net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
watch = halfstep.watch(net, name="mine", config={"width": 8})
step = 0
while not Path("end").exists():
    step += 1
    loss = net(torch.ones(4, 8)).square().mean() * (1e38 if step == 5 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    time.sleep(0.02)
watch.log({"sizes": halfstep.Histogram([0.0, 1.0, 1.0], bins=2)})
watch.log({"tone": halfstep.Audio([0.0], 8000)})
"""
SCALES = f"{LINES}.find(t => t.name === 'scale').y"


@pytest.mark.only_on("sqlite")
def test_a_script_that_watches_itself_is_followed_to_what_it_logged(
    database: Database, ada: User, site_address: str, page: Page, tmp_path: Path
) -> None:
    """A watched script's page grows without a mention of workers, then has a histogram and
    audio.
    """
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "writer", kind="write")
    (tmp_path / "train.py").write_text(SCRIPT)
    page.goto("/runs")  # the empty list opens the first run that arrives
    wait_until(page, "document.readyState === 'complete'")
    training = warm.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "HALFSTEP_URL": site_address, "HALFSTEP_TOKEN": token},
        stderr=subprocess.PIPE,
        text=True,
    )
    page.wait_for_url("**/runs/1")
    status = page.locator(STATUS)
    expect(status).to_have_text("Running")
    until(lambda: page.evaluate(DRAWN) > 5)
    drawn = page.evaluate(DRAWN)
    until(lambda: page.evaluate(DRAWN) > drawn)
    expect(page.locator(".identity .meta")).to_contain_text("watched")
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    said = page.locator("main").inner_text().lower()
    assert [word for word in ("lease", "worker", "unreachable", "queue") if word in said] == []
    (tmp_path / "end").touch()
    expect(status).to_have_text("Finished")
    training.communicate()
    with database.reading() as session:
        steps = runs.get(session, 1).step
    until(lambda: page.evaluate(DRAWN) == steps)
    expect(page.locator("[data-skip-count]")).to_have_text("1 skipped step")
    scales = [2.0**20] * 5 + [2.0**19] * (steps - 5)
    until(lambda: page.evaluate(SCALES) == scales)

    open_tab(page, "Media")
    sizes = page.get_by_role("region", name="sizes.histogram.json", exact=True)
    expect(sizes.locator(".plot")).to_have_attribute("data-drawn", "1")
    tone = page.get_by_role("region", name="tone", exact=True)
    expect(tone.get_by_role("button", name=re.compile("^Play tone"))).to_be_visible()
    expect(tone.locator(".clips .number")).to_have_text(re.compile(" s$"))
