"""Layout of the new-run form, and its command line."""

import re
import shlex

import pytest
from playwright.sync_api import Page, expect

from app.submission.forms import MAIN
from db.database import Database
from db.tables import User
from halfstep.cli import options
from tests.app.conftest import submit


def test_what_matters_is_in_sight_without_scrolling(offered: None, page: Page) -> None:
    """Recipe, precision, main settings and the primary button are visible without scrolling."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/new?recipe=digits")
    places = [".recipes", ".precisions", "[data-start]"]
    known = [f'[id="{path}"]' for path in MAIN if page.locator(f'[id="{path}"]').count()]
    assert len(known) >= 3
    for place in places + known:
        box = page.locator(place).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 900, place
    expect(page.locator(".primary:visible")).to_have_text(["Start run"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/new?recipe=digits", "training.max_grad_norm"),
        ("sweeps/new?recipe=digits", "runs"),
        ("account", "days"),
    ],
)
def test_a_decimal_comma_is_refused(offered: None, page: Page, path: str, name: str) -> None:
    """A decimal comma reaches the server as typed and is refused, so 0,003 is not read as 3."""
    page.goto(f"/{path}")
    field = page.locator(f'[id="{name}"]')
    field.fill("")
    field.press_sequentially("0,003")
    field.evaluate("e => { e.form.noValidate = true; e.form.requestSubmit() }")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_value("0,003")


def test_the_form_is_there_again_after_a_corrected_mistake(offered: None, page: Page) -> None:
    """A corrected field is no longer marked; going back from the run shows the sent form and its
    command, without the browser asking to send it again.
    """
    page.goto("/runs/new?recipe=digits")
    norm = page.locator("[name='training.max_grad_norm']")
    norm.fill("0,01")
    page.get_by_role("button", name="Start run").click()
    expect(page.locator("[data-mistakes]")).to_be_visible()
    expect(page.locator(".field.wrong")).to_have_count(1)
    norm.fill("0.01")
    expect(page.locator(".field.wrong")).to_have_count(0)
    page.get_by_role("button", name="Start run").click()
    expect(page).to_have_url(re.compile(r"/runs/\d+$"))
    page.go_back()
    expect(norm).to_have_value("0.01")
    expect(page.locator("[data-terminal]")).to_contain_text("--set training.max_grad_norm=0.01")


@pytest.mark.parametrize("width", [768, pytest.param(1024, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "path", ["runs/new?recipe=digits", "sweeps/new?recipe=digits", "sweeps/new/command"]
)
def test_the_button_that_starts_is_in_view_on_a_tablet(
    offered: None, page: Page, path: str, width: int
) -> None:
    """On a tablet the start button stays next to the form or below it."""
    page.set_viewport_size({"width": width, "height": 768})
    page.goto(f"/{path}")
    for y in (0, 300):
        page.evaluate("y => scrollTo(0, y)", y)
        expect(page.locator("[data-start]")).to_be_in_viewport(ratio=1)


@pytest.mark.extended
def test_an_error_of_a_main_setting_is_below_its_hint(offered: None, page: Page) -> None:
    """A setting's error is below its hint, also in rows with aligned labels and inputs."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/new?recipe=digits")
    page.evaluate("document.querySelector('form.run-form').noValidate = true")
    page.locator('[id="training.steps"]').fill("0")
    page.get_by_role("button", name="Start run").click()
    error = page.locator('[id="training.steps-error"]')
    expect(error).to_be_visible()
    box, hint = error.bounding_box(), page.locator('[id="training.steps-hint"]').bounding_box()
    assert box is not None
    assert hint is not None
    assert box["y"] >= hint["y"] + hint["height"]


@pytest.mark.parametrize("width", [320, 360, 640, 768, 900, 1024, 1280, 1440, 1920, 2560])
def test_the_form_never_scrolls_sideways(offered: None, page: Page, width: int) -> None:
    """The form with all groups open does not scroll sideways at any width."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto("/runs/new?recipe=digits")
    page.evaluate("document.querySelectorAll('details.group').forEach((each) => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_help_is_readable_in_full(offered: None, page: Page, width: int) -> None:
    """Help texts of recipes and settings wrap."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto("/runs/new?recipe=digits")
    texts = page.locator(".recipes span, .main-settings .hint, .described")
    assert texts.count() > 5
    cut = "all => all.filter((one) => one.scrollHeight > one.clientHeight + 1 && one.clientHeight)"
    assert texts.evaluate_all(f"{cut}.map((one) => one.textContent)") == []


def test_the_automatic_name_drops_a_refused_value(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The automatic name follows the values, also after a rejection; a typed name stays."""
    submit(database, ada, name="first")
    page.goto("/runs/new?from=1")
    steps, name = page.locator('[id="training.steps"]'), page.locator("#name")
    steps.fill("0")
    page.get_by_label("Tags").fill("tried")
    expect(name).to_have_value("first, steps=0")
    page.get_by_role("button", name="Start run").click()
    expect(page.locator('[id="training.steps-error"]')).to_be_visible()
    expect(name).to_have_value("first, steps=0")
    steps.fill("20")
    expect(name).to_have_value("first, steps=20")
    steps.fill("-1")
    name.fill("Own name")
    page.get_by_role("button", name="Start run").click()
    expect(page.locator('[id="training.steps-error"]')).to_be_visible()
    steps.fill("30")
    expect(name).to_have_value("Own name")


def test_what_is_changed_is_marked_as_it_is_typed(offered: None, page: Page) -> None:
    """A closed group shows its values and the number of changes; a field shows its default."""
    page.goto("/runs/new?recipe=digits")
    group = page.locator("details[data-group=scaler]")
    summary, tag = group.locator("summary"), group.locator("[data-changed]")
    expect(summary).to_contain_text("enabled true, initial scale 16777216")
    expect(tag).to_be_hidden()
    summary.click()
    scale = group.get_by_label("Initial scale")
    scale.fill("65536")
    summary.click()
    expect(summary).to_contain_text("enabled true, initial scale 65536")
    expect(tag).to_have_text("1 changed")
    expect(page.locator(".all-settings")).to_contain_text("settings, 1 of them changed")
    summary.click()
    expect(group.locator(".field.changed")).to_contain_text("Default: 16777216")
    scale.fill("16777216.0")
    expect(group.locator(".field.changed")).to_have_count(0)
    expect(page.locator("details[data-group=modules] summary")).to_have_text(
        re.compile(r"Modules\s+\w+")
    )


def test_a_link_to_a_setting_shows_it(offered: None, page: Page) -> None:
    """A link to a setting opens its group, marks it as changed and focuses it."""
    setting = "scaler.init_scale"
    page.goto(f"/runs/new?recipe=digits&set={setting}=65536#{setting}")
    expect(page.get_by_label("Initial scale")).to_be_focused()
    expect(page.get_by_label("Initial scale")).to_be_in_viewport()
    expect(page.locator(".field.changed")).to_contain_text("Default: 16777216")


def test_the_command_follows_the_form(offered: None, page: Page) -> None:
    """The command submits the same run with the differing options."""
    page.goto("/runs/new?recipe=digits")
    command = page.locator("[data-command]")
    expect(command).to_have_text("halfstep run submit digits \\\n  --precision fp16")
    page.get_by_label("Steps", exact=True).fill("77")
    page.locator("[name=precision][value=bf16]").check()
    page.get_by_label("Name", exact=True).fill("it's mine")
    expect(command).to_contain_text("training.steps=77")
    words = shlex.split(command.inner_text().replace("\\\n", " "))
    assert words[:4] == ["halfstep", "run", "submit", "digits"]
    fields = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert words[words.index("--name") + 1] == "it's mine"
    assert options.configuration(fields, words[words.index("--precision") + 1]) == {
        "training": {"steps": 77},
        "precision": "bf16",
    }
