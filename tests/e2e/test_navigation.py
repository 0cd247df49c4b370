"""Navigation between and within pages: menu, keys, selections and prefilled forms."""

import re

import pytest
from playwright.sync_api import Page, expect

from db.access import projects
from db.database import Database
from db.files import checkpoints
from db.queue import queue
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.conftest import submit
from tests.db.telemetry.telemetry_made import make_steps, record
from tests.e2e.test_access import found_on
from tests.spool_made import checkpoint_of

#: A point of the loss panel's plot, in parts of its width.
PLOT = "[data-plot=loss] .nsewdrag"


def test_pages_for_actions_without_permission_are_hidden(
    page: Page, database: Database, ada: User
) -> None:
    """A viewer, as in `halfstep show`, sees no links to workers, trash and retention."""
    page.goto("/runs")
    places = [f'.rail [href="/{name}"]' for name in ("runs", "workers", "recipes")]
    places += [f'#account-menu [href="/{name}"]' for name in ("trash", "storage", "retention")]
    for role, count in (("member", 7), ("viewer", 2)):  # the list of runs has two links
        with database.writing() as session:
            user = session.get_one(User, ada.id)
            user.is_admin = False
            projects.set_role(session, user, "", role)
        page.reload()
        page.get_by_label("Account menu").click()
        expect(page.locator(", ".join(places)).locator("visible=true")).to_have_count(count)


def test_a_menu_without_an_entry_is_not_offered(
    page: Page, database: Database, ada: User, running: Run
) -> None:
    """A viewer may do nothing in the menu of a run that has ended."""
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
    for role, is_offered in (("member", True), ("viewer", False)):
        with database.writing() as session:
            user = session.get_one(User, ada.id)
            user.is_admin = False
            projects.set_role(session, user, "", role)
        page.goto("/runs/1")
        expect(page.get_by_label("More actions")).to_be_visible(visible=is_offered)


def test_the_rail_leads_everywhere(page: Page) -> None:
    """The navigation has artifacts and reports; on a phone the rest is behind More."""
    page.goto("/runs")
    rail = page.get_by_role("navigation", name="Main")
    for name in ("Runs", "Sweeps", "Reports", "Artifacts", "Workers", "Recipes", "Alerts"):
        expect(rail.get_by_role("link", name=name)).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    expect(rail.locator("> :visible")).to_have_text(
        ["Search", "Runs", "Sweeps", "Reports", re.compile("^Alerts"), re.compile("More$")]
    )
    boxes = rail.locator("> :visible").evaluate_all("all => all.map(e => e.offsetWidth)")
    assert min(boxes) >= 44
    rail.get_by_text("More").click()
    page.locator("#account-menu").get_by_role("link", name="Artifacts").click()
    page.wait_for_url("**/artifacts")


def test_keys_lead_to_pages_and_to_the_runs_beside_one(
    database: Database, ada: User, running: Run, page: Page
) -> None:
    """g and a letter open a page, brackets the neighbouring runs, / the page's search."""
    submit(database, ada, name="second")
    page.goto("/runs/1")
    page.keyboard.press("]")
    page.wait_for_url("**/runs/2")
    page.keyboard.press("]")  # there is none
    page.keyboard.press("[")
    page.wait_for_url("**/runs/1")
    page.get_by_role("tab", name="Log").click()
    page.keyboard.press("/")
    expect(page.get_by_label("Search the log")).to_be_focused()
    page.keyboard.type("gr")
    expect(page.get_by_label("Search the log")).to_have_value("gr")
    page.get_by_label("Search the log").blur()
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/runs")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/sweeps")


def test_a_tag_is_typed_at_once_and_the_bar_covers_no_row(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The tag field has the focus, and the last row can be scrolled above the bar."""
    for n in range(40):
        submit(database, ada, name=f"run {n}")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs")
    page.locator("tr[data-key='1'] input").check()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    bar = page.locator(".selection-bar").bounding_box()
    foot = page.locator(".list-foot").bounding_box()
    assert bar
    assert foot
    assert foot["y"] + foot["height"] <= bar["y"]
    page.locator(".selection-bar").get_by_role("button", name="Tag").click()
    page.keyboard.type("baseline")
    page.get_by_role("button", name="Add tag").click()
    expect(page.locator("tr[data-key='1'] .tag")).to_have_text("baseline")


def test_names_stay_beside_chosen_columns(
    database: Database, ada: User, offered: None, page: Page
) -> None:
    """The end of a name stays readable while columns scroll under it."""
    submit(database, ada, name=f"experiment {'x' * 60} learning rate 0.003")
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/runs?columns=status,loss,val/accuracy,precision,created,duration,owner,tags")
        assert _whole_parts(page) == ["rate 0.003"]
        cell = page.locator("td[data-column=name]")
        before = cell.bounding_box()
        page.locator(".table-scroll:has(.runs)").evaluate("e => e.scrollLeft = 400")
        assert cell.bounding_box() == before
        for column in ("precision", "created", "duration", "owner"):
            expect(page.locator(f"th[data-column={column}]")).to_be_visible()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("first, learning_rate=0.0005, steps=1800", ["=0.0005, ", "=1800"]),
        pytest.param(
            "first-run fp16 without scaler seed 2 again",
            ["seed 2 again"],
            marks=pytest.mark.extended,
        ),
    ],
)
@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.extended)])
def test_the_end_of_a_name_and_values_of_settings_are_shown_whole(
    database: Database,
    ada: User,
    offered: None,
    page: Page,
    name: str,
    parts: list[str],
    width: int,
) -> None:
    """A name does not cover the number and the status, and keeps its end and values of settings."""
    submit(database, ada, name=name)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto("/runs?view=charts" if width > 390 else "/runs")
    assert _whole_parts(page) == parts
    cell = "tr[data-key='1'] td[data-column=name]"
    [end, number] = [
        page.locator(f"{cell} {part}").bounding_box() for part in (".run-name", "a + .quiet")
    ]
    assert end
    assert number
    assert end["x"] + end["width"] <= number["x"] + 1


def _whole_parts(page: Page) -> list[str]:
    """Return the complete parts of the first run's name that must not be cut."""
    parts = page.locator("tr[data-key='1'] .run-name > :not(.cut)")
    box = "e.parentElement.getBoundingClientRect()"
    is_whole = f"e.getBoundingClientRect().right <= {box}.right + 1"
    texts: list[str] = parts.evaluate_all(
        f"all => all.filter((e) => {is_whole}).map((e) => e.textContent)"
    )
    return texts


@pytest.fixture
def ended(database: Database, running: Run) -> Run:
    """A run with a checkpoint at its last step."""
    record(database, running, make_steps([3.0 - n / 500 for n in range(400)]))
    files = [{"kind": "checkpoint", "size_bytes": 1000, "sha256": "c0ffee" * 10}]
    event = {"step": 400, "reason": "end", "files": files}
    with database.writing() as session:
        checkpoints.publish(session, 1, 1, checkpoint_of(event), ["400.pt"])
        queue.end(session, 1, 1, Status.FINISHED)
    return running


def test_a_fork_is_accepted_as_it_is_proposed(ended: Run, page: Page) -> None:
    """A fork from the last step gets more steps and its own name."""
    page.goto("/runs/1#files")
    page.get_by_role("link", name="Fork from step 400").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value(f"{ended.name} from step 400")
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/2")
    expect(page.locator(".identity")).to_contain_text("from run 1, step 400")


def test_all_panels_follow_a_zoom_at_once_and_without_a_hint(ended: Run, page: Page) -> None:
    """All panels follow a zoom at once, before the finer points arrive."""
    page.goto("/runs/1")
    page.wait_for_selector("[data-plot=scale][data-drawn]")
    page.route("**/series?*", lambda route: None)  # never answered
    box = page.locator(PLOT).bounding_box()
    assert box
    x, y = box["x"], box["y"] + box["height"] / 4
    page.mouse.move(x + 0.6 * box["width"], y)
    page.mouse.down()
    page.mouse.move(
        x + 0.9 * box["width"], y - 21, steps=5
    )  # not level, but no box without a point
    page.mouse.up()
    ranges = "[...document.querySelectorAll('.hero .plot')].map(e => e.layout.xaxis.range.join())"
    page.wait_for_url("**range=**")
    shown = page.evaluate(ranges)
    assert len(shown) == 2
    assert len(set(shown)) == 1
    assert shown[0] != "1,400"
    expect(page).not_to_have_url(re.compile("y.loss"))
    expect(page.locator(".plotly-notifier")).to_have_count(0)


def test_storage_has_the_size_of_the_data_folder(
    settings: Settings, running: Run, page: Page
) -> None:
    """The storage page has each entry's size and what runs store; list and settings link to it."""
    (settings.data / "spare").mkdir(parents=True, exist_ok=True)
    (settings.data / "spare" / "file").write_bytes(bytes(3 * 2**20))
    page.goto("/runs")
    page.get_by_role("link", name="Storage").last.click()
    page.wait_for_url("**/storage")
    entry = page.locator("tr", has_text="spare")
    expect(entry).to_contain_text("3 MiB")
    assert list(found_on(page)) == []
