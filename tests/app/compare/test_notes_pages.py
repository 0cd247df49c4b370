"""Notes on projects and on comparisons: who may write them, and which charts they embed."""

import re
from xml.etree import ElementTree

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.html import chart_links
from db.access import accounts, projects
from db.database import Database
from db.runs import notes
from db.tables import User
from tests.app.auth.permissions_made import script_of
from tests.app.conftest import CONFIG, start_run, submit
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record


def test_a_note_on_runs_side_by_side(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A note on a comparison has its own page, and is shown wherever these runs are compared, in
    any order.
    """
    submit(database, ada)
    submit(database, ada)
    assert 'href="/notes?runs=2,1">Add a note</a>' in browser.get("/compare?runs=2,1").text
    assert "Note on runs 2,1" in browser.get("/notes?runs=2,1").text
    form = {"runs": "2,1", "note": "# Why\n\n/compare?runs=1,2\n\n<b>", "seen": ""}
    assert browser.post("/notes", data=form).headers["location"] == "/compare?runs=2,1"
    page = browser.get("/compare?runs=1,2").text
    assert "<h2>Why</h2>" in page
    assert 'src="/charts.svg?runs=1%2C2&amp;series=loss"' in page
    assert "&lt;b&gt;" in page
    assert "<h2>Why</h2>" not in browser.get("/compare?runs=1").text
    late = browser.post("/notes", data=form | {"note": "mine"})
    assert late.status_code == 422
    assert "This was changed in the meantime" in late.text
    assert ">mine</textarea>" in late.text
    again = {**form, "note": "", "seen": form["note"]}
    assert browser.post("/notes", data=again).status_code == 303
    assert "Why" not in browser.get("/compare?runs=1,2").text
    long = browser.post("/notes", data=form | {"note": "x" * 20_001})
    assert "20,001 characters; allowed: at most 20,000" in long.text
    assert browser.get("/notes?runs=1,9").status_code == 404


@pytest.mark.slow
def test_a_note_on_a_project_is_written_by_who_may_submit_to_it(
    app: FastAPI, database: Database, ada: User, offered: None
) -> None:
    """Users who may submit to a project write its note, and others who see it read the note."""
    with database.writing() as session:
        for name in ("vision", "speech"):
            projects.make(session, name)
        roles = {"member": "vision", "viewer": "vision", "outsider": "speech"}
        people = {name: accounts.make_user(session, name) for name in roles}
        for name, project in roles.items():
            role = name if name in ("member", "viewer") else "member"
            projects.set_role(session, people[name], project, role)
    submit(database, ada, project="vision")
    submit(database, ada, project="speech")
    scripts = {name: script_of(app, database, user) for name, user in people.items()}
    form = {"project": "vision", "note": "Our **plan**", "seen": ""}
    assert scripts["member"].post("/notes", data=form).status_code == 303
    assert scripts["viewer"].post("/notes", data=form).status_code == 403
    assert scripts["outsider"].post("/notes", data=form).status_code == 404
    assert "<strong>plan</strong>" in scripts["viewer"].get("/projects").text
    assert "Edit the note" not in scripts["viewer"].get("/projects").text
    assert "Edit the note" in scripts["member"].get("/projects").text
    assert "<strong>plan" not in scripts["outsider"].get("/projects").text
    with database.writing() as session:
        notes.write(session, ada, notes.of_runs([1, 2]), "secret words", "")
    for name in roles:
        assert "secret words" not in scripts[name].get("/compare?runs=1,2").text
        assert scripts[name].get("/notes?runs=1,2").status_code == 404


def test_the_first_project_has_a_note(browser: TestClient) -> None:
    """The Default project's note can be edited, although its name is an empty form value."""
    answer = browser.post("/notes", data={"project": "", "note": "Our **plan**", "seen": ""})
    assert answer.headers["location"] == "/projects"
    assert "<strong>plan</strong>" in browser.get("/projects").text


@pytest.mark.parametrize("series", ["loss", "val/accuracy"])
def test_a_chart_is_a_picture(
    app: FastAPI, database: Database, ada: User, offered: None, browser: TestClient, series: str
) -> None:
    """A chart has a named line for each visible run, with gaps and marks where it is non-finite."""
    run = start_run(database, ada, name="<base>")
    steps = [3.0, 2.0, float("nan"), 1.5]
    record(database, run, make_steps(steps), events=[make_metric(2, 1.5), make_metric(4, 3)])
    answer = browser.get(f"/charts.svg?runs=1,7&series={series}")
    assert answer.headers["content-type"].startswith("image/svg+xml")
    assert "sandbox" in answer.headers["content-security-policy"]
    picture = ElementTree.fromstring(answer.text)
    names = "{http://www.w3.org/2000/svg}"
    lines = [each for each in picture.iter(f"{names}path") if each.get("stroke")]
    assert [each.get("d", "").count("M") for each in lines] == [2 if series == "loss" else 1]
    texts = [each.text for each in picture.iter(f"{names}text")]
    assert {"<base>", "3", "1.5"} <= set(texts)
    assert texts.count("✕") == (series == "loss")
    with database.writing() as session:
        stranger = accounts.make_user(session, "stranger")
    hidden = script_of(app, database, stranger).get(f"/charts.svg?runs=1&series={series}").text
    assert "base" not in hidden
    assert "no values" in hidden
    assert "no values" in browser.get("/charts.svg?runs=1&series=none").text


def test_a_picture_of_loss_scales_leaves_out_runs_without_a_scaler(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Runs without a scaler have no line at 1 in a chart of loss scales."""
    for name, is_scaled in (("with scaler", True), ("without", False)):
        config = CONFIG | {"scaler": {"enabled": is_scaled}}
        record(database, start_run(database, ada, name=name, config=config), make_steps([1.0] * 3))
    picture = browser.get("/charts.svg?runs=1,2&series=scale").text
    assert ">with scaler<" in picture
    assert ">without<" not in picture


def test_a_picture_has_whole_names_and_scales_as_powers() -> None:
    """A legend takes a second row if its names need it; an axis of loss scales has powers
    of two.
    """
    names = [f"fp16 without scaler seed {seed}" for seed in range(4)]
    lines = {name: ([1, 2, 3], [2.0**24, 4.0, 2.0**13]) for name in names}
    picture = str(chart_links.picture("scale", lines, range(4), series="scale"))
    assert all(f">{name}<" in picture for name in names)
    assert '>2<tspan dy="-5" font-size="10">24</tspan><' in picture
    heights = re.findall(r'cy="(\d+)"', picture)
    assert len(set(heights)) == 4
    path = re.search(r'class="c0" d="([^"]*)"', picture)
    assert path
    down = re.fullmatch(r"M70.0 ([\d.]+)H268.0V([\d.]+)H466.0V([\d.]+)", path[1])
    assert down
    high, low, middle = map(float, down.groups())
    assert middle == pytest.approx((high + low) / 2, abs=0.1)
