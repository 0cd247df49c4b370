"""Media of a run: a card for each key with its own step, and the list of files."""

import json
import re
from io import BytesIO

import numpy as np
import plotly.graph_objects as go
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from db.database import Database
from db.files import checkpoints
from db.queue import queue
from db.settings import Settings
from db.tables import Run, Status
from halfstep import figures, plot
from tests.e2e.test_access import found_on
from tests.e2e.test_artifacts import PICTURE, publish
from tests.site import until
from tests.spool_made import checkpoint_of

STEPS = (100, 200)


@pytest.fixture
def shown(settings: Settings, database: Database, running: Run) -> None:
    """Files of every kind at two steps; an image and a text at the first step only."""
    for step in STEPS:
        rows = [f"{number},word {number % 7},{number / 8}" for number in range(1, 46)]
        table = "\n".join(["id,text,score", *rows, "46,rows.cell-1-2.png,-1"])
        histogram = {"lowest": 0.0, "highest": step / 100, "counts": [1, 2], "nonfinite": 0}
        matrix = plot.confusion_matrix(y_true=[0, 1, 1], preds=[0, 1, 0], class_names=["a", "b"])
        files = {
            "rows.csv": table.encode(),
            "rows.cell-1-2.png": PICTURE,
            **{f"shots-{number}.png": PICTURE for number in range(20)},
            "shots-0.caption.txt": b"a zero",
            "weights.histogram.json": json.dumps(histogram).encode(),
            "sample.txt": f"at {step}".encode(),
            "matrix.plot.json": matrix.encode(),
            "curve.plot.json": plot.roc_curve([0, 1, 1], [0.1, 0.9, 0.4]).encode(),
            "settings.json": b"{}",
        }
        for name, body in files.items():
            publish(settings, database, running, name, body, step=step)
    publish(settings, database, running, "once.png", PICTURE)
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)


def card_of(page: Page, key: str) -> Locator:
    """Return the card of a key."""
    return page.get_by_role("region", name=key, exact=True)


def test_a_card_for_each_key_stands_in_the_first_screen(shown: None, page: Page) -> None:
    """Cards are in three, two or one columns; six end above the fold without overflow."""
    for width, height, columns in ((1440, 900, 3), (1024, 768, 2), (390, 844, 1)):
        page.set_viewport_size({"width": width, "height": height})
        page.goto("/runs/1#media")
        cards = page.locator(".media")
        expect(cards).to_have_count(7)
        expect(page.get_by_role("tab", name="Media")).to_contain_text("7")
        boxes = cards.evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())")
        assert len({box["x"] for box in boxes}) == columns
        assert len({box["height"] for box in boxes}) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width == 1440:
            assert page.evaluate("scrollY") == 0
            assert boxes[5]["bottom"] <= 875
            shots = card_of(page, "shots").locator("img")
            expect(shots).to_have_count(20)
            sizes = shots.evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())")
            assert all(box["width"] >= 44 for box in sizes)
            assert sizes[-1]["bottom"] <= boxes[-1]["bottom"]
    assert list(found_on(page)) == []
    page.set_viewport_size({"width": 1440, "height": 900})
    assert list(found_on(page)) == []


def test_sliders_move_together_when_linked(shown: None, page: Page) -> None:
    """Linked cards move to their last step up to the chosen one, also by keyboard."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/1?tab=media")
    text, matrix, once = (card_of(page, key) for key in ("sample.txt", "matrix.plot.json", "once"))
    expect(text.locator("pre")).to_have_text("at 200")
    text.focus()
    page.keyboard.press("[")
    expect(text.locator("pre")).to_have_text("at 100")
    expect(matrix.locator("output")).to_have_text("step 100")
    expect(once.get_by_role("slider")).to_be_disabled()
    page.get_by_label("All at the same step").uncheck()
    text.get_by_role("slider").press("ArrowRight")
    expect(text.locator("pre")).to_have_text("at 200")
    expect(matrix.locator("output")).to_have_text("step 100")
    page.reload()
    expect(page.get_by_label("All at the same step")).not_to_be_checked()


def test_keys_are_found_and_a_search_without_match_says_what_there_is(
    shown: None, page: Page
) -> None:
    """A search matches words of key and kind, and Escape clears it."""
    page.goto("/runs/1?tab=media")
    find = page.get_by_placeholder("Find a key or kind")
    find.fill("matrix")
    expect(page.locator(".media:visible")).to_have_count(1)
    find.fill("nothing like it")
    none = page.locator("[data-no-match]")
    expect(none).to_contain_text("sample.txt")
    none.get_by_role("button", name="Clear search").click()
    expect(page.locator(".media:visible")).to_have_count(7)
    find.fill("rows")
    find.press("Escape")
    expect(page.locator(".media:visible")).to_have_count(7)


def test_tables_plots_and_pictures_are_shown(shown: None, page: Page) -> None:
    """Tables can be sorted, values at the pointer are shown, images open, and lost ones are
    reported.
    """
    page.set_viewport_size({"width": 1440, "height": 900})
    page.route("**/artifacts/*/download", lambda route: route.continue_())
    page.goto("/runs/1?tab=media")
    table = page.get_by_role("region", name="Table rows.csv")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(20)
    fact = card_of(page, "rows.csv").locator("[data-fact]")
    expect(fact).to_have_text("1–20 of 46 rows")
    table.get_by_role("button", name="score").press("Enter")
    expect(rows.first).to_contain_text("-1")
    expect(table.locator("th[aria-sort=ascending]")).to_have_text("score ↑")
    rows.first.locator(".picture").press("Enter")
    caption = page.get_by_role("dialog", name="Picture").get_by_role("status")
    expect(caption).to_contain_text("rows.cell-1-2.png · step 200 · ")
    page.keyboard.press("ArrowLeft")
    expect(caption).to_contain_text("rows.cell-1-2.png · step 100 · ")
    assert list(found_on(page)) == []
    page.keyboard.press("Escape")

    matrix = card_of(page, "matrix.plot.json")
    drawn = matrix.get_by_role("img", name="Confusion matrix: 2 of 3 examples on the diagonal")
    expect(drawn).to_have_attribute("data-drawn", "2")
    head = matrix.locator("[data-fact]")
    expect(head).to_have_text("accuracy 66.7 %")
    height = matrix.evaluate("e => e.offsetHeight")
    drawn.locator(".nsewdrag").hover(position={"x": 40, "y": 20})
    expect(head).to_have_text("true a, predicted a: 1 (100 %)")
    assert matrix.evaluate("e => e.offsetHeight") == height
    curve = page.get_by_role("img", name="ROC: 1 AUC 1")
    expect(curve).to_have_attribute("data-drawn", "1")
    heat = page.get_by_role("img", name="Histograms weights.histogram.json by step")
    heat.scroll_into_view_if_needed()
    expect(heat).to_have_attribute("data-drawn", "2")
    assert heat.evaluate("e => [e.data[0].x, e.layout.shapes[0].x0]") == [list(STEPS), STEPS[-1]]
    expect(card_of(page, "shots").locator("figcaption")).to_have_text("a zero")

    page.route("**/artifacts/*/download", lambda route: route.fulfill(status=404))
    page.reload()
    expect(card_of(page, "once")).to_contain_text("Not on the server")


def test_figures_videos_and_documents_are_shown(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """Figures have the page's colours; documents keep their styles in a frame."""
    table = [{"class": name, "accuracy": number / 4} for number, name in enumerate("abc")]
    document = b"<style>h1 { color: rgb(1, 2, 3) }</style><h1>Report</h1>"
    files = {
        "bars.plot.json": plot.bar(table, "class", "accuracy", title="Accuracy").encode(),
        "report.html": document,
        "clip.mp4": b"no video",
        "beep.wav": b"no sound",
        "beep.caption.txt": b"a short beep",
        **{f"row-{number}.png": PICTURE for number in range(8)},
        "row-0.caption.txt": b"Pred: 2 Truth: 2",
    }
    for name, body in files.items():
        publish(settings, database, running, name, body)
    page.goto("/runs/1?tab=media")
    bars = page.get_by_role("img", name="Accuracy")
    expect(bars).to_have_attribute("data-drawn", "1")
    expect(card_of(page, "bars.plot.json").locator(".tag")).to_have_text("Figure")
    frame = page.frame_locator("iframe[title='Document report.html']")
    expect(frame.get_by_role("heading", name="Report")).to_be_visible()
    heading = frame.get_by_role("heading", name="Report")
    expect(heading).to_have_css("color", "rgb(1, 2, 3)")
    expect(card_of(page, "clip.mp4")).to_contain_text("Not on the server")
    expect(card_of(page, "beep").get_by_role("listitem")).to_have_count(1)
    expect(card_of(page, "beep").locator("figcaption")).to_have_text("a short beep")
    caption = card_of(page, "row").locator("figcaption")
    expect(caption).to_have_text("Pred: 2 Truth: 2")
    assert caption.evaluate("e => e.scrollWidth <= e.clientWidth && e.offsetHeight > 20")
    assert list(found_on(page)) == []


def test_points_and_meshes_in_space_are_drawn(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """Plotly meshes and point clouds are drawn in their cards by WebGL."""
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    x, y, z = corners.T
    faces = np.array([[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]])
    mesh = go.Mesh3d(x=x, y=y, z=z, i=faces[0], j=faces[1], k=faces[2], color="red")
    points = go.Scatter3d(x=x, y=y, z=z, mode="markers", marker={"color": "blue"})
    figure = go.Figure([mesh, points], {"title": "Tetrahedron"})
    content = figures.of_plotly(figure).encode()
    publish(settings, database, running, "body.plot.json", content)
    page.goto("/runs/1?tab=media")
    drawn = page.get_by_role("img", name="Tetrahedron")
    expect(drawn).to_have_attribute("data-drawn", "2")
    canvas = drawn.locator(".gl-container canvas").first
    expect(canvas).to_be_visible()

    def is_drawn() -> bool:
        with Image.open(BytesIO(canvas.screenshot())) as picture:
            red, green, blue = np.moveaxis(np.asarray(picture.convert("RGB"), int), 2, 0)
        faces_drawn, points_drawn = red > green + blue + 30, blue > red + green + 30
        return bool(faces_drawn.sum() > 500 and points_drawn.sum() > 20)

    until(is_drawn)
    assert list(found_on(page)) == []


def test_full_screen_has_the_filter_and_pages_of_a_table(shown: None, page: Page) -> None:
    """F shows a card in full screen, with a table's filter and pages."""
    page.goto("/runs/1?tab=media")
    card = card_of(page, "rows.csv")
    card.focus()
    page.keyboard.press("f")
    page.wait_for_selector(".media:fullscreen")
    box = card.locator(".data-table")
    box.get_by_role("button", name="Next").click()
    box.get_by_role("button", name="Next").click()
    expect(box.locator("tbody tr")).to_have_count(6)
    expect(box.get_by_role("button", name="Next")).to_be_disabled()
    box.get_by_role("searchbox").fill("WORD 3")
    expect(card.locator("[data-fact]")).to_have_text("1–7 of 7 rows that match, of 46")


def test_files_are_a_plain_list(shown: None, page: Page) -> None:
    """Files are listed by key and step with downloads; on a phone rows are blocks."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/runs/1#files")
    until(lambda: page.evaluate("document.readyState") == "complete")
    assert page.evaluate("scrollY") == 0
    rows = page.locator(".files tbody tr")
    expect(rows).to_have_count(8)
    expect(rows.locator("td:first-child")).to_have_text(
        [
            "rows.csv",
            "shots",
            "weights.histogram.json",
            "sample.txt",
            "matrix.plot.json",
            "curve.plot.json",
            "settings.json",
            "once",
        ]
    )
    expect(rows.filter(has_text="shots").locator("td").nth(3)).to_have_text("2 × 21")
    sample = rows.filter(has_text="sample.txt")
    sample.locator("summary").click()
    with page.expect_download() as started:
        sample.get_by_role("link", name="100", exact=True).click()
    assert started.value.path().read_text() == "at 100"
    assert list(found_on(page)) == []
    page.set_viewport_size({"width": 390, "height": 844})
    until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390)
    assert list(found_on(page)) == []


def test_a_run_without_media_has_no_tab_for_them(
    database: Database, running: Run, page: Page
) -> None:
    """Without media there is no tab, and its URL opens the files."""
    for address in ("/runs/1?tab=media", "/runs/1#media"):
        page.goto("/runs")
        page.goto(address)
        expect(page.get_by_role("tab", selected=True)).to_have_text(re.compile("^Files"))
        expect(page.get_by_role("tab", name="Media")).to_have_count(0)


@pytest.mark.parametrize("width", [390, 700, 1024, 1440])
def test_the_newest_checkpoint_comes_first(
    database: Database, running: Run, page: Page, width: int
) -> None:
    """The newest checkpoint is first, and no table scrolls sideways."""
    page.set_viewport_size({"width": width, "height": 800})
    with database.writing() as session:
        for step in (9_999_000, 10_000_000):
            kinds = ("checkpoint", "weights")
            files = [{"kind": kind, "size_bytes": 1000, "sha256": "c0ffee" * 10} for kind in kinds]
            event = {"step": step, "reason": "interval", "files": files}
            checkpoints.publish(session, 1, 1, checkpoint_of(event), [f"{step}.pt", f"{step}.s"])
    for is_over in (False, True):
        if is_over:
            with database.writing() as session:
                queue.end(session, 1, 1, Status.FINISHED)
        page.goto("/runs/1?tab=files")
        rows = page.locator(".checkpoints tbody tr")
        expect(rows.first).to_contain_text("10,000,000")
        expect(rows.nth(2)).to_contain_text("9,999,000")
        rows.first.scroll_into_view_if_needed()
        for name in ("Download", "Fork from step 10000000", "New run from weights"):
            expect(rows.first.get_by_role("link", name=name)).to_be_in_viewport(ratio=1)
        boxes = page.locator("[data-panel=files] .table-scroll")
        assert boxes.evaluate_all("all => all.every((box) => box.scrollWidth <= box.clientWidth)")


def test_checkpoints_fit_a_phone(
    settings: Settings, database: Database, running: Run, page: Page
) -> None:
    """On a phone the line that loads a checkpoint wraps."""
    files = [{"kind": "weights", "size_bytes": 1000, "sha256": "c0ffee" * 10}]
    event = {"step": 5, "reason": "end", "files": files}
    with database.writing() as session:
        checkpoints.publish(session, 1, 1, checkpoint_of(event), ["5.safetensors"])
        queue.end(session, 1, 1, Status.FINISHED)
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 844})
        page.goto("/runs/1?tab=files")
        line = page.locator(".load code").bounding_box()
        card = page.locator("#checkpoints").bounding_box()
        assert line
        assert card
        assert line["x"] + line["width"] <= card["x"] + card["width"]
