"""Media of a run: tables, plots of classifiers, pictures, histograms and texts over its steps."""

import json

import pytest
from playwright.sync_api import Page, expect

from db.database import Database
from db.settings import Settings
from db.tables import Run
from halfstep import plot
from tests.e2e.test_access import found_on
from tests.e2e.test_artifacts import PICTURE, publish
from tests.site import until

STEPS = (100, 200)


@pytest.fixture
def shown(settings: Settings, database: Database, running: Run) -> None:
    """Files of every kind at two steps."""
    for step in STEPS:
        rows = [f"{number},word {number % 7},{number / 8}" for number in range(1, 46)]
        table = "\n".join(["id,text,score", *rows, "46,rows.cell-1-2.png,-1"])
        histogram = {"lowest": 0.0, "highest": step / 100, "counts": [1, 2], "nonfinite": 0}
        matrix = plot.confusion_matrix(y_true=[0, 1, 1], preds=[0, 1, 0], class_names=["a", "b"])
        files = {
            "rows.csv": table.encode(),
            "rows.cell-1-2.png": PICTURE,
            "grid.png": PICTURE,
            "weights.histogram.json": json.dumps(histogram).encode(),
            "sample.txt": f"at {step}".encode(),
            "matrix.plot.json": matrix.encoded(),
            "curve.plot.json": plot.roc_curve([0, 1, 1], [0.1, 0.9, 0.4]).encoded(),
        }
        for name, body in files.items():
            publish(settings, database, running, name, body, step=step)


def test_table_is_sorted_filtered_and_paged_and_shows_its_pictures(shown: None, page: Page) -> None:
    """By keyboard: numbers sort as numbers, a filter counts its rows, a cell opens its picture."""
    page.goto("/runs/1?tab=files")
    table = page.get_by_role("region", name="Table rows.csv")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(20)
    box = page.locator(".data-table")
    expect(box.get_by_role("status")).to_have_text("1–20 of 46 rows")
    box.get_by_role("button", name="Next").click()
    box.get_by_role("button", name="Next").click()
    expect(rows).to_have_count(6)
    expect(box.get_by_role("button", name="Next")).to_be_disabled()
    table.get_by_role("button", name="score").press("Enter")
    box.get_by_role("button", name="Previous").click()
    box.get_by_role("button", name="Previous").click()
    expect(rows.first).to_contain_text("-1")
    expect(table.locator("th[aria-sort=ascending]")).to_have_text("score ↑")
    table.get_by_role("button", name="score").press("Enter")
    expect(rows.first).to_contain_text("5.625")
    box.get_by_role("searchbox").fill("WORD 3")
    expect(box.get_by_role("status")).to_have_text("1–7 of 7 rows that match, of 46")
    box.get_by_role("searchbox").fill("cell-1")
    rows.first.locator(".picture").press("Enter")
    expect(page.get_by_role("dialog", name="Picture")).to_contain_text("rows.cell-1-2.png")


def test_pictures_open_in_a_lightbox_and_plots_are_drawn(shown: None, page: Page) -> None:
    """Arrow keys lead through all pictures; a matrix, curves, heat map and texts stand in cards."""
    page.goto("/runs/1?tab=files")
    grid = page.locator("[data-media] .media-grid").first
    grid.get_by_role("button", name="Enlarge grid.png of step 200").click()
    caption = page.get_by_role("dialog", name="Picture").get_by_role("status")
    expect(caption).to_have_text("grid.png · step 200 · 2 of 4")
    assert list(found_on(page)) == []
    page.keyboard.press("ArrowRight")
    expect(caption).to_have_text("rows.cell-1-2.png · step 100 · 3 of 4")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(caption).to_have_text("grid.png · step 100 · 1 of 4")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Picture")).to_have_count(0)

    words = "Confusion matrix: 2 of 3 examples on the diagonal"
    matrix = grid.get_by_role("img", name=words)
    matrix.scroll_into_view_if_needed()
    expect(matrix).to_have_attribute("data-drawn", "2")
    cells = "e => [e.data[0].customdata, e._fullLayout.xaxis.ticktext]"
    counts = [["1 (100 %)", "0 (0 %)"], ["1 (50 %)", "1 (50 %)"]]
    assert matrix.evaluate(cells) == [counts, ["a", "b"]]
    curve = grid.get_by_role("img", name="ROC: 1 AUC 1")
    curve.scroll_into_view_if_needed()
    expect(curve).to_have_attribute("data-drawn", "1")
    heat = page.get_by_role("img", name="Histograms weights.histogram.json by step")
    heat.scroll_into_view_if_needed()
    expect(heat).to_have_attribute("data-drawn", "2")
    assert heat.evaluate("e => [e.data[0].x, e._fullLayout.yaxis.title.text]") == [
        list(STEPS),
        "value",
    ]
    texts = page.get_by_role("region", name="sample.txt by step").locator("pre")
    expect(texts).to_have_text([f"at {step}" for step in STEPS])
    assert list(found_on(page)) == []
    page.set_viewport_size({"width": 390, "height": 844})
    until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390)
