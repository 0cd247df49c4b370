"""axe-core finds no violation on any page, in either theme, on desktop and phone."""

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from app.sweeps import sweep_submission
from app.sweeps.sweep_submission import SweepSubmission
from db.access import secrets
from db.alerts import channels
from db.alerts import rules as alert_rules
from db.alerts.alert_evaluation import Seen, evaluate
from db.database import Database
from db.files import retention
from db.files.pruning import Rules
from db.runs import notes, presets, reports, runs, trash, views
from db.runs.reports import Content
from db.settings import Settings
from db.tables import Run, Status, User
from db.telemetry import telemetry
from db.telemetry.telemetry import LogRow
from halfstep.telemetry.events import Sample
from tests.app.checks.checks_made import add_check
from tests.app.conftest import CONFIG, start_run, submit
from tests.app.files.weight_uploads_api_made import offer_weights
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_headroom,
    make_histogram,
    make_metric,
    make_module,
    make_precision_diff,
    make_precision_plan,
    make_replay,
    make_skip,
    make_steps,
    record,
)
from tests.e2e.artifacts_made import FILES, publish

#: WCAG 2.2 AA, and what axe's authors hold to be good besides: landmarks, order of headings.
TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa", "best-practice")
#: In the dark theme only colours differ, so only their rules are checked again.
RULES = {
    "light": list(TAGS),
    "dark": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]},
}
FP8 = [
    f"{kind}{more}" for kind in ("activation", "weight", "gradient") for more in ("", "_underflow")
]
#: What is folded away is looked at too; the links to share would lie over their page.
UNFOLD = "document.querySelectorAll('details:not(.share)').forEach(each => { each.open = true })"
PHONE = {"width": 390, "height": 844}

EMPTY = ("/runs", "/sweeps", "/alerts", "/reports", "/checks", "/trash")
FULL = (
    "/runs?columns=status,step,loss,scale,health,training.batch_size,tags",
    "/runs?filter=nonsense:",
    "/runs?filter=recipe:digits+-status:queued",
    "/runs?view=charts",
    "/runs?group=no-such-setting",
    "/runs/1",
    "/runs/2",
    "/runs/1/precision-plan",
    "/compare?runs=1,2&settings=all",
    "/sweeps",
    "/sweeps/1",
    "/alerts",
    "/trash",
    "/reports",
    "/reports/1/edit",
    "/reports/new?runs=1,2&metrics=loss",
    "/checks",
    "/checks/1",
    "/runs/new",
    "/runs/new?recipe=digits",
    "/sweeps/new?recipe=digits",
    "/runs/new/command",
    "/sweeps/new/command",
    "/sweeps/new/agents",
    "/workers",
    "/workers/1",
    "/recipes",
    "/recipes/digits",
    "/account",
    "/people",
    "/projects",
    "/retention",
    "/notes?runs=1,2",
    "/audit",
    "/secrets",
    "/api/v1/docs",
    "/help/glossary",
    "/help/amp",
    "/runs?group=batch_size&columns=loss,val/accuracy",
    "/runs/999",
)
ON_A_PHONE = (
    "/retention",
    "/runs",
    "/runs?filter=recipe:digits",
    "/workers",
    "/recipes",
    "/runs/1",
    "/checks",
    "/checks/1",
    "/runs/new?recipe=digits",
    "/help/amp",
)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with a data folder, where the key of secrets is created."""
    settings.data.mkdir()
    return settings


def found_on(page: Page) -> Iterator[str]:
    """Return axe's violations on the current page, in each theme."""
    page.evaluate(UNFOLD)
    for theme, rules in RULES.items():
        page.emulate_media(color_scheme=theme)
        options = {"runOnly": rules, "resultTypes": ["violations"]}
        for violation in Axe().run(page, options=options).response["violations"]:
            for node in violation["nodes"]:
                where = f"{page.url} {theme} {page.viewport_size['width']}"
                yield f"{where}: {violation['id']}: {node['html'][:200]}: {node['failureSummary']}"


def fill(settings: Settings, database: Database, owner: User) -> None:
    """Add rows of everything that pages show."""
    offer_weights(database)
    run = start_run(database, owner, tags="a,b")
    modules = [make_module(name, -30, [1, 5, 9]) for name in ("body", "head")]
    looks = [make_headroom(step, body=(70000.0, 1e-9), head=(1.0, "Infinity")) for step in (5, 9)]
    events = [
        *make_events([3]),
        make_skip(4, "model.0.bias"),
        make_replay(4),
        make_metric(5, 0.5),
        make_histogram(5, *modules),
        *looks,
        {"event": "layer_norms", "step": 5, "layers": ["body"], "norms": [1.0]},
        {"event": "updates", "step": 5, "modules": [{"name": "body", "wanted": 10, "lost": 9}]},
        {"event": "fp8", "step": 5, "modules": [{"name": "body", **dict.fromkeys(FP8, 0.5)}]},
        make_precision_diff(6),
        make_precision_plan(),
        {"event": "spike", "step": 7, "loss": 20.5, "z": 99.5, "rolled_back_to": 5},
    ]
    record(database, run, make_steps([1.0] * 60, skipped=[3, 4]), events=events)
    log = [
        {"number": n, "attempt": 1, "time": 1.0, "stream": stream, "text": f"line of {stream}"}
        for n, stream in enumerate(("stdout", "stderr"), 1)
    ]
    sample = {"device": -1, "elapsed_ms": 5, "utilization": 0.5, "memory_bytes": 9}
    with database.writing() as session:
        session.get_one(Run, run.id).note = "# A note\n\n| a | b |\n|--|--|\n| 1 | 2 |"
        flush = telemetry.Flush(
            log_lines=[LogRow(**each) for each in log],
            samples=[Sample(**sample, power_watts=None, temperature_celsius=None)],
        )
        telemetry.record(session, run.id, run.attempt, flush)
    for name, body in FILES.items():
        publish(settings, database, run, name, body)
    add_check(database, owner)
    submit(database, owner, config=CONFIG | {"precision": "bf16"})
    submit(database, owner)
    with database.writing() as session:
        runs.set_status(session, session.get_one(Run, 3), Status.CANCELLED)
        trash.delete(session, 3, owner)
        secrets.put(session, settings.secrets_key, owner, "API_KEY", "open-sesame")
        text = "A chart:\n\n/compare?runs=1,2"
        notes.write(session, owner, notes.of_runs([1, 2]), text, "")
        content = Content("Why", "# Words\n\n> quoted", [])
        for _number in range(2):
            report = reports.create(session, owner, "", content)
        reports.delete(session, report.id)
        place: dict[str, Any] = {"recipe": "digits", "config": {}, "place": {}}
        presets.save(session, owner, "", "usual", **place)
        retention.set_rule(session, owner, None, Rules(checkpoint_days=30))
        address = "https://hooks.example/services/T"
        channels.make(session, settings.secrets_key, owner, kind="slack", name="o", address=address)
        views.save(session, owner, "mine", filter="tag:a", sort="-id", columns="")
        alert_rules.make(
            session, owner, condition="scale_below", scope="run", run_id=1, value=2.0**30
        )
        space = {"training.batch_size": "16, 32"}
        submission = SweepSubmission(recipe="digits", space=space, goal="minimise", at_once=1)
        sweep_submission.begin(session, owner, submission)
    assert evaluate(database, Seen(), "http://here") == 1


def test_axe_finds_nothing_on_any_page(
    settings: Settings, database: Database, ada: User, page: Page
) -> None:
    """All pages meet WCAG 2.2 AA with all sections expanded, in both themes."""
    found: list[str] = []
    for path in EMPTY:
        page.goto(path)
        found += found_on(page)
    fill(settings, database, ada)
    for path in FULL:
        page.goto(path)
        found += found_on(page)
    for key in ("?", "Control+k"):
        page.keyboard.press(key)
        expect(page.get_by_role("dialog")).to_be_visible()
        found += found_on(page)
        page.keyboard.press("Escape")
    page.set_viewport_size(PHONE)
    for path in ON_A_PHONE:
        page.goto(path)
        found += found_on(page)
    page.get_by_role("button", name="Account menu").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    found += found_on(page)
    assert not found, "\n".join(found)
