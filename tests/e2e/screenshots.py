"""Take the documents' screenshots of the running product: `make screenshots`, or by name: `python
-m tests.e2e.screenshots comparison report`. This takes a few minutes.

A server and a worker train what the screenshots show; a failing script is watched as well.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db.database import Database
from db.tables import StepBlock, Worker
from tests.browser import launch, wait_until
from tests.site import until, up

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PATIENCE = 180_000  # milliseconds
#: Of a picture and of all of them: a clone of the repository brings them.
MOST_BYTES, MOST_BYTES_OF_ALL = 150_000, 1_500_000
DESK, PHONE = (1440, 900), (390, 844)
#: Every chart that is in view is drawn.
DRAWN = """() => [...document.querySelectorAll('.chart-panel .plot, [data-plan-plot]')]
    .filter((plot) => plot.offsetParent && plot.getBoundingClientRect().top < innerHeight)
    .every((plot) => plot.dataset.drawn || plot.querySelector('.points path'))"""
FAILING = """
import torch, halfstep
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", growth_interval=40)
halfstep.watch(model, scaler=scaler, name="regression fp16", config={"learning_rate": 0.05})
for step in range(180):
    x = torch.randn(32, 64 if step < 179 else 63)
    with torch.autocast("cpu", torch.float16):
        loss = (model(x) - x.sum(1, keepdim=True) / 8).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
REPORT = """## Does fp16 keep up?

Handwritten digits in four precisions, one seed. **fp16 with a loss scaler** reaches the loss of
fp32; the scale grows every 25 steps, and each overflow costs one step.

```panel
title: Loss and loss scale
runs: {runs}
metrics: loss, scale
```

| precision | keep it? |
|---|---|
| fp16 with scaler | yes |
| bf16 | yes, where the hardware has it |

```runs
runs: {runs}
columns: precision, skipped, loss, val/accuracy, run/step_ms
```
"""


class Site:
    """The running product, used by its API."""

    def __init__(self, page: Page, link: str) -> None:
        self.page, self.address = page, "{0.scheme}://{0.netloc}".format(urlsplit(link))
        page.goto(link)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/runs*")
        token = page.locator("meta[name=csrf-token]").get_attribute("content")
        self.headers = {"x-csrf-token": str(token)}

    def get(self, path: str) -> Any:
        """Return the response to a GET request of the API."""
        return self.page.request.get(f"{self.address}/api/v1{path}").json()

    def post(self, path: str, **body: Any) -> Any:
        """Send a POST request."""
        address = f"{self.address}/api/v1{path}"
        answer = self.page.request.post(address, data=body, headers=self.headers)
        assert answer.ok, answer.text()
        return answer.json()

    def submit(self, precision: str, steps: int, **recipe: float) -> int:
        """Queue a run; return its id."""
        config = {"precision": precision, "training": {"steps": steps}, "recipe": recipe}
        return int(self.post("/runs", recipe="digits", config=config)["id"])

    def wait(self, *run_ids: int) -> None:
        """Wait for runs to end."""
        ended = ("finished", "failed", "cancelled")

        def have_ended() -> bool:
            return all(self.get(f"/runs/{run_id}")["status"] in ended for run_id in run_ids)

        until(have_ended, 300)

    def watch(self, script: str) -> int:
        """Run a watched script; return its run's id."""
        token = self.post("/tokens", name="script", kind="write")["token"]
        environment = {"HALFSTEP_URL": self.address, "HALFSTEP_TOKEN": token}
        code = [sys.executable, "-c", script]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                code,
                env={**os.environ, **environment},
                cwd=folder,
                check=False,
                stderr=subprocess.DEVNULL,
            )
        [run] = self.get("/runs?filter=source:watch")["runs"]
        return int(run["id"])


@dataclass(frozen=True)
class Picture:
    """A screenshot of the top of a page. path: with placeholders for run ids."""

    path: Callable[[dict[str, Any]], str]
    height: int = DESK[1]
    themes: tuple[str, ...] = ("light",)
    size: tuple[int, int] = DESK
    #: Changes the database before, where the product alone would not get there.
    prepare: Callable[[Session], object] = lambda _session: None


def damage_live_run(session: Session) -> None:
    """Damage the first block of the running run."""
    live = select(StepBlock.run_id).where(StepBlock.first > 0).order_by(StepBlock.run_id.desc())
    first = StepBlock.run_id == live.limit(1).scalar_subquery(), StepBlock.first < 64
    session.execute(update(StepBlock).where(*first).values(data=b"x" * 100))


def add_outdated_worker(session: Session) -> None:
    """Add a worker of the previous version, as during an upgrade."""
    [worker] = session.scalars(select(Worker))
    fields = {"name": "gpu-box-2", "host": "gpu-box-2", "pid": 1, "versions": {}}
    copied = {name: getattr(worker, name) for name in ("devices", "recipes", "recipe_names")}
    session.add(Worker(**fields, **copied))


def of(text: str) -> Callable[[dict[str, Any]], str]:
    """Return a path with the ids of the created runs filled in."""
    return lambda made: text.format(**made)


BOTH = ("light", "dark")
PICTURES = {
    "runs": Picture(of("/runs"), 560, BOTH),
    "split": Picture(of("/runs?view=charts")),
    "run": Picture(of("/runs/{fp16}"), themes=BOTH),
    "live": Picture(of("/runs/{live}")),
    "collapsed": Picture(of("/runs/{collapsed}"), themes=BOTH),
    "new-run": Picture(of("/runs/new?recipe=digits")),
    "comparison": Picture(of("/compare?runs={four}"), 1150, size=(1440, 1400)),
    "sweep": Picture(of("/sweeps/{sweep}")),
    "alerts": Picture(of("/alerts"), 420),
    "precision-diff": Picture(of("/runs/{diff}?tab=gradients"), 820),
    "precision-plan": Picture(of("/runs/{plan}/precision-plan"), 1150, size=(1440, 1200)),
    "report": Picture(of("/reports/{report}"), 1000, BOTH, (1440, 1000)),
    "run-phone": Picture(of("/runs/{fp16}"), PHONE[1], size=PHONE),
    "damaged": Picture(of("/runs/{live}"), 420, prepare=damage_live_run),
    "outdated-worker": Picture(of("/workers"), 420, prepare=add_outdated_worker),
    "runs-phone": Picture(of("/runs"), PHONE[1], themes=("dark",), size=PHONE),
}


def main(chosen: list[str]) -> None:
    """Train runs for the screenshots, and take the chosen ones."""
    if unknown := set(chosen) - {*PICTURES}:
        sys.exit(f"{', '.join(sorted(unknown))}: allowed are {', '.join(PICTURES)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        up(HALFSTEP_DATA=data) as (_process, link),
        sync_playwright() as playwright,
    ):
        browser = launch(playwright)
        page = browser.new_page()
        expect.set_options(timeout=PATIENCE)
        page.set_default_timeout(PATIENCE)
        site = Site(page, link)
        made = train(site)
        database = Database(f"sqlite:///{data}/halfstep.db")
        for name in chosen:
            with database.writing() as session:
                PICTURES[name].prepare(session)
            take(page, site.address, name, made)
        browser.close()
    whole = sum(path.stat().st_size for path in IMAGES.iterdir())
    print(f"{len(list(IMAGES.iterdir()))} pictures, {whole:,} bytes")
    assert whole <= MOST_BYTES_OF_ALL, f"{whole:,} bytes; allowed: {MOST_BYTES_OF_ALL:,}"


def train(site: Site) -> dict[str, Any]:
    """Train the runs of the screenshots, the last one endlessly; return their ids."""
    until(lambda: bool(site.get("/workers")["workers"]), 120)
    for condition in ("collapsing", "failed", "diverged"):
        site.post("/alerts/rules", condition=condition, scope="all")
    # The collapse has an alert; the precisions and the sweep are the usual work.
    collapsed = site.submit("fp16", 600, learning_rate=1000.0)
    first = site.submit("fp16", 400)
    site.wait(collapsed, first)
    group = site.post(f"/runs/{first}/comparison")["runs"]
    space = {"recipe.learning_rate": "loguniform(1e-4, 1e-1)", "training.batch_size": [32, 64, 128]}
    search = {
        "kind": "random",
        "runs": 9,
        "metric": "val/loss",
        "name": "learning rate, batch size",
    }
    config = {"training": {"steps": 150}, "evaluation": {"every_steps": 50}}
    sweep = site.post("/sweeps", recipe="digits", space=space, config=config, **search)["id"]
    failed = site.watch(FAILING)
    four = [column["run"]["id"] for column in group]
    site.wait(*four)
    until(lambda: site.get(f"/sweeps/{sweep}")["status"] == "finished", 300)
    text = REPORT.format(runs=", ".join(map(str, four)))
    report = site.post("/reports", title="Precisions of digits", text=text)["id"]
    fp16 = site.submit("fp16", 2000)
    site.wait(fp16)
    plan, diff = (
        site.post(f"/runs/{fp16}/measurements", task=task)["id"]
        for task in ("precision_plan", "precision_diff")
    )
    site.wait(plan, diff)
    live = site.submit("fp16", 200_000)
    until(lambda: site.get(f"/runs/{live}")["step"] > 4500, 240)
    made = {"collapsed": collapsed, "failed": failed, "sweep": sweep, "report": report}
    made |= {"plan": plan, "diff": diff}
    return {**made, "fp16": fp16, "live": live, "four": ",".join(map(str, four))}


def take(page: Page, address: str, name: str, made: dict[str, Any]) -> None:
    """Take a screenshot in each of its themes."""
    picture = PICTURES[name]
    width, height = picture.size
    page.set_viewport_size({"width": width, "height": height})
    for theme in picture.themes:
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.goto(f"{address}{picture.path(made)}")
        wait_until(page, DRAWN)
        clip = {"x": 0, "y": 0, "width": width, "height": picture.height}
        save(page.screenshot(clip=clip), f"{name}{'-dark' if theme == 'dark' else ''}")  # type: ignore[arg-type]


def save(content: bytes, name: str) -> None:
    """Save a screenshot with its 256 most frequent colours."""
    path = IMAGES / f"{name}.png"
    with Image.open(BytesIO(content)) as image:
        full = image.convert("RGB")
        counts = full.getcolors(full.width * full.height) or []
        frequent = [color for _count, color in sorted(counts, reverse=True)[:256]]
        palette = Image.new("P", (1, 1))
        palette.putpalette([part for color in frequent for part in color])
        full.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size <= MOST_BYTES, f"{path} has {size:,} bytes; allowed: {MOST_BYTES:,}"


if __name__ == "__main__":
    main(sys.argv[1:] or [*PICTURES])
