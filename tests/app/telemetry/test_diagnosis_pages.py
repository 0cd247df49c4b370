"""Findings of a run, on its page and in the API."""

from typing import Any

import pytest
from sqlalchemy import select
from starlette.testclient import TestClient

from app.live import run_updates
from db.database import Database
from db.files import checkpoints
from db.queue import queue
from db.settings import Settings
from db.tables import ControlRequest, Diagnosis, Run, Status, User
from tests.app.conftest import CONFIG, submit
from tests.db.files.checkpoints_made import make_saved
from tests.db.telemetry.telemetry_made import (
    make_headroom,
    make_histogram,
    make_module,
    make_precision_diff,
    make_precision_row,
    make_replay,
    make_skip,
    make_steps,
    record,
)
from tests.spool_made import checkpoint_of


def test_header_and_list_show_the_verdict(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Header and list show the loss-scale health; the header explains it with figures."""
    record(database, running, make_steps([1.0] * 50, skipped=[1, 2]))
    page = browser.get("/runs/1").text
    assert 'data-health="healthy"' in page
    assert "2 of 50 steps (4 %) were skipped, at most 2 in a row" in page
    assert 'data-health="healthy"' in browser.get("/runs").text
    health = browser.get("/api/v1/runs/1").json()["health"]
    assert (health["word"], health["figures"]["steps_since_skip"]) == ("healthy", 48)


def test_run_without_a_scale_has_no_verdict(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A bf16 run has no scaling health, since it needs no scaler."""
    submit(database, ada, config=CONFIG | {"precision": "bf16"})
    assert "data-health" not in browser.get("/runs/1").text
    assert browser.get("/api/v1/runs/1").json()["health"] is None


def test_counts_of_a_gpus_skip_are_its_replays(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A GPU skip that was recorded with names only shows the counts of its exact replay."""
    skip = make_skip(7, "model.0.bias", "model.head.bias")
    skip["culprits"] = [{"name": each["name"]} for each in skip["culprits"]]
    counted = {"optimizer": "adamw", "name": "model.head.bias", "inf": 12, "nan": 0}
    events = [skip, make_replay(7) | {"culprits": [counted]}]
    record(database, running, events=events)
    page = " ".join(browser.get("/runs/1").text.split())
    assert '<code>model.head.bias</code>: <span class="quiet">12 inf</span>' in page


def test_skip_shows_counts_and_what_its_replay_found(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A skip shows its counts of inf and NaN, and from its replay the direction, the module, and
    its input next to 65504.
    """
    forward = make_skip(9, "model.0.bias", loss_nonfinite=True)
    events = [make_skip(7, "model.0.bias", "model.head.bias"), forward, make_replay(7)]
    record(database, running, events=events)
    page = " ".join(browser.get("/runs/1").text.split())
    assert '<code>model.head.bias</code>: <span class="quiet">3 inf, 1 NaN</span>' in page
    assert "backward pass (gradients only)" in page
    assert "forward pass (loss not finite)" in page
    assert "<b>model.head</b>, backward, <code>AddmmBackward0</code> in float16" in page
    assert "largest input 70,123 of at most 65,504" in page
    assert 'form="replay" name="step" value="9"' in page
    assert 'form="replay" name="step" value="7"' not in page
    assert browser.get("/api/v1/runs/1/replays").json()["replays"][0]["module"] == "model.head"


def test_replay_that_is_not_exact_says_why(
    database: Database, running: Run, browser: TestClient
) -> None:
    """An inexact replay has its notes; one that found nothing says what to do."""
    replay = make_replay(7, found=False, exact=False, notes=["dropout draws anew"])
    record(database, running, events=[make_skip(7, "a.b"), replay])
    page = browser.get("/runs/1").text
    assert "Nothing overflowed this time." in page
    assert "Not exact: dropout draws anew" in page
    assert "start from scale" in page
    assert 'href="/runs/new?from=1&amp;set=scaler.init_scale=524288.0#scaler.init_scale"' in page
    replay = make_replay(70, found=False, exact=False, notes=["dropout draws anew"])
    record(database, running, events=[make_skip(70, "a.b"), replay])
    page = browser.get("/runs/1").text
    link = "/runs/new?from=1&before=70&set=diagnosis.replay_skips=100"
    assert f'href="{link.replace("&", "&amp;")}#diagnosis.replay_skips">Fork before' in page
    checkpoint = checkpoint_of(make_saved(40))
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint, ["key-40"])
    assert 'name="parent_step" value="40"' in browser.get(link).text


@pytest.mark.parametrize(
    ("name", "value", "kind"), [("scale", 1024, "scale"), ("replays", 7, "replay")]
)
def test_controls_work_by_form_and_api(
    database: Database, running: Run, browser: TestClient, name: str, value: int, kind: str
) -> None:
    """A form for a diagnosis redirects to the run; the API returns the number of the request."""
    field = {"scale": "scale", "replays": "step"}[name]
    answer = browser.post(f"/runs/1/{name}", data={field: str(value)})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/1")
    if name == "scale":
        assert browser.post("/runs/1/scale", data={"scale": "2^x"}).status_code == 422
        browser.post("/runs/1/scale", data={"scale": "2^10"})
    assert browser.post(f"/api/v1/runs/1/{name}", json={field: str(value)}).status_code == 202
    with database.reading() as session:
        requests = session.scalars(select(ControlRequest)).all()
    assert {(request.kind, request.value) for request in requests} == {(kind, value)}
    assert len(requests) == (3 if name == "scale" else 2)


def test_an_impossible_request_is_rejected_with_a_reason(running: Run, browser: TestClient) -> None:
    """An impossible diagnosis request is rejected with the value and the allowed ones."""
    answer = browser.post("/api/v1/runs/1/scale", json={"scale": -1})
    assert answer.status_code == 422
    assert answer.json()["errors"] == {"scale": "-1; allowed: 2^-126 to 2^127"}
    assert "allowed: 1 to 400" in browser.post("/runs/1/replays", data={"step": "999"}).text


def test_histograms_come_by_module(database: Database, running: Run, browser: TestClient) -> None:
    """The API returns histograms of one module or all together, and the page lists the modules."""
    modules = [make_module("body", -10, [1, 2]), make_module("head", -9, [5])]
    record(database, running, events=[make_histogram(100, *modules)])
    found: dict[str, Any] = browser.get("/api/v1/runs/1/histograms").json()
    assert found["modules"] == ["body", "head"]
    assert found["samples"][0]["counts"] == [1, 7]
    head = browser.get("/api/v1/runs/1/histograms", params={"module": "head"}).json()
    assert head["samples"][0]["counts"] == [5]
    assert "<option>head</option>" in browser.get("/runs/1").text


def test_live_updates_include_diagnoses(
    database: Database, settings: Settings, running: Run, browser: TestClient
) -> None:
    """Live updates have the changed row of a replayed skip, and announce a histogram once."""
    look = run_updates.of_run(database, settings, running.id)
    record(database, running, make_steps([1.0]), events=[make_skip(1, "a.b")])
    first = look("")
    assert first is not None
    modules = [make_module("a", -40, [1], underflow=1.0)]
    record(database, running, events=[make_replay(1), make_histogram(1, *modules)])
    second = look(first.cursor)
    assert second is not None
    assert "model.head" in second.data
    assert '"diagnosed":["histogram","replay"]' in second.data
    assert "Gradients underflow" in second.data
    assert look(second.cursor) is None
    titles = [each["title"] for each in browser.get("/api/v1/runs/1/findings").json()["findings"]]
    assert titles == ["Gradients underflow"]


def test_page_has_the_norms_of_layers(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The page has a section of layer norms with the numbers that its chart draws."""
    norms = {"layers": ["model.0"], "norms": ["NaN"]}
    record(database, running, events=[{"event": "layer_norms", "step": 50, **norms}])
    assert "Gradient norms by layer" in browser.get("/runs/1").text
    found = browser.get("/api/v1/runs/1/layer-norms").json()
    assert found == {"steps": [50], "layers": ["model.0"], "norms": [["NaN"]]}


def test_page_has_the_headroom_of_modules(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The module with least headroom in the last measurement is first; one beyond fp16 has none."""
    of_modules = {"zero": (0.0, None), "roomy": (1.0, 65504 / 2**3), "over": (1.0, "Infinity")}
    events = [make_headroom(step, **of_modules) for step in (50, 100)]
    record(database, running, events=events)
    page = browser.get("/runs/1").text
    assert "Powers of two below 65,504, step 100" in page
    section = page.partition('<section id="headroom"')[2].partition("</section>")[0]
    assert section.index("over") < section.index("roomy") < section.index("zero")
    assert "<b>none</b>" in section
    assert ">3<" in section
    looks = browser.get("/api/v1/runs/1/headroom").json()
    assert looks["steps"] == [50, 100]
    assert looks["modules"] == ["zero", "roomy", "over"]
    assert looks["left"] == [[None] * 2, [3.0] * 2, ["-Infinity"] * 2]


def test_page_has_the_smallest_numbers_where_they_were_measured(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Modules have their smallest nonzero values next to fp16's, or a dash if all are zero."""
    module = {"name": "model.0", "dtype": "float16", "activation": 1.0, "gradient": 2.0}
    smallest = {"smallest_activation": 2.0**-20, "smallest_gradient": None}
    event = {"event": "headroom", "step": 50, "scale": 8.0, "modules": [module | smallest]}
    record(database, running, events=[event])
    section = browser.get("/runs/1").text.partition('<section id="headroom"')[2]
    section = section.partition("</section>")[0]
    assert "smallest nonzero values (fp16's is 2⁻²⁴, 5.96e-8)" in section
    assert 'title="Activation 9.537e-7, gradient –">9.5e-7</td>' in section


def test_page_has_what_fp8_makes_of_layers(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The page has the last fp8 measurement of each layer; a layer without a gradient has a
    dash.
    """
    assert 'id="fp8"' not in browser.get("/runs/1").text
    fields = {"activation": 3.5, "weight": 0.5, "gradient": None, "activation_underflow": 0.125}
    layer = {"name": "<b>", **fields, "weight_underflow": 0.0, "gradient_underflow": None}
    for step in (50, 100):
        record(database, running, events=[{"event": "fp8", "step": step, "modules": [layer]}])
    section = browser.get("/runs/1").text.partition('<section id="fp8">')[2]
    section = section.partition("</section>")[0]
    assert "Step 100" in section
    assert "<td>&lt;b&gt;</td>" in section
    cells = ("3.5", "12.5 %", "0.5", "0 %", "–", "–")
    assert "".join(f'<td class="number">{cell}</td>' for cell in cells) in section


def test_page_has_the_updates_that_round_away(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The last count of lost updates lists the module that loses most first."""
    modules = [
        {"name": "body", "wanted": 1000, "lost": 5},
        {"name": "head", "wanted": 8, "lost": 6},
    ]
    for step in (50, 100):
        event = {"event": "updates", "step": step, "modules": modules}
        record(database, running, events=[event])
    section = browser.get("/runs/1").text.partition('<section id="updates">')[2]
    section = section.partition("</section>")[0]
    assert "Step 100" in section
    assert section.index(">head<") < section.index(">75 %<") < section.index(">body<")
    assert "Saved" not in section
    event["modules"] = [{"name": "body", "wanted": 1000, "lost": 5, "saved": 321}]
    record(database, running, events=[event | {"step": 150}])
    section = browser.get("/runs/1").text.partition('<section id="updates">')[2]
    assert '<th class="number">Saved</th>' in section
    assert '<td class="number">321</td>' in section


def test_no_run_calibrates_after_its_end(
    database: Database, running: Run, browser: TestClient
) -> None:
    """List and banner of an ended run say that the loss scale's calibration was not finished."""
    record(database, running, make_steps([1.0] * 5, skipped=[1, 2]))
    with database.writing() as session:
        queue.end(session, running.id, running.attempt, Status.CANCELLED)
    assert ">Not calibrated</span>" in browser.get("/runs").text
    assert "<b>Calibration not finished.</b>" in browser.get("/runs/1").text


def section_of(page: str) -> str:
    """Return the section of the precision diff, without line breaks."""
    section = page.partition('<section id="precision-diff"')[2].partition("</section>")[0]
    return " ".join(section.split())


def test_page_has_the_last_precision_diff(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The last precision diff lists modules in order with both parts of their errors, the
    suggestion and a link to a fork with it.
    """
    assert "A precision plan names" in browser.get("/runs/1").text
    healthy = make_precision_diff(50, rows=[make_precision_row("body")], suggested=[])
    record(database, running, events=[healthy | {"causes": []}])
    assert "was not measured" in section_of(browser.get("/runs/1").text)
    record(database, running, events=[make_precision_diff(100)])
    page = browser.get("/runs/1").text
    section = section_of(page)
    assert "A precision plan names" not in page
    assert "in step 100: the gradient" in page  # the card of the lab
    assert "Step 100" in section
    assert section.index("<code>(loss)</code>") < section.index("<code>body</code>")
    assert "Local 0.0003, inherited 0.0004; cosine 1, 11 bits" in section
    assert "Local error unknown: one of its inputs exceeds" in section
    assert "which would leave an error of 0.0005" in section
    assert "Modules by the gradient error that each causes alone" in section
    assert '<td class="number">25 %</td><td class="number">50 %</td>' in section
    assert "<code>head</code> <span" in section
    assert "set=modules.fp32%3D%5B%22head%22%5D" in section
    fork = browser.get("/runs/new?from=1&set=modules.fp32%3D%5B%22head%22%5D").text
    assert "head" in fork


def test_page_without_suggestion_says_so(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A diff of healthy modules has no suggestion, and a run without a diff has no section."""
    assert section_of(browser.get("/runs/1").text) == ""
    rows = [make_precision_row("a<b>"), make_precision_row("a<b>", call=2, error=float("nan"))]
    sound = {"rows": rows, "suggested": [], "suggested_error": None}
    diff = make_precision_diff(50, **sound, error=1e-3, cosine=1.0)
    record(database, running, events=[diff])
    section = section_of(browser.get("/runs/1").text)
    assert "No module needs fp32" in section
    assert 'width="nan"' not in section
    assert "a&lt;b&gt;" in section
    assert "call 2" in section
    assert "New run with" not in section
    record(database, running, events=[make_precision_diff(60, **sound, error=1.17, cosine=0.6)])
    section = section_of(browser.get("/runs/1").text)
    assert "No module needs fp32" not in section
    assert "The gradient has an error of 1.17, and no module was found" in section


def test_a_diff_that_cannot_be_read_costs_only_itself(
    database: Database, running: Run, browser: TestClient
) -> None:
    """Page and API leave out a diff of an unknown version."""
    with database.writing() as session:
        content = {"step": 50, "dtype": "float4", "rows": 7}
        session.add(Diagnosis(run_id=running.id, kind="precision_diff", step=50, content=content))
    assert section_of(browser.get("/runs/1").text) == ""
    assert browser.get("/api/v1/runs/1/precision-diffs").json() == {"steps": [50], "diff": None}


def test_precision_diffs_of_the_api(database: Database, running: Run, browser: TestClient) -> None:
    """The API has the last precision diff or that of a step; numbers that JSON lacks are texts."""
    url = "/api/v1/runs/1/precision-diffs"
    assert browser.get(url).json() == {"steps": [], "diff": None}
    earlier = make_precision_diff(50, rows=[make_precision_row("body")], suggested=[])
    record(database, running, events=[earlier, make_precision_diff(100)])
    last = browser.get(url).json()
    assert last["steps"] == [50, 100]
    assert (last["diff"]["step"], last["diff"]["error"]) == (100, "Infinity")
    assert [each["name"] for each in last["diff"]["suggestions"]] == ["head"]
    assert [row["name"] for row in last["diff"]["rows"]][:3] == ["(loss)", "body", "body"]
    first = browser.get(url, params={"step": 50}).json()["diff"]
    assert (first["step"], first["suggestions"]) == (50, [])
    assert browser.get(url, params={"step": 51}).json()["diff"] is None
    assert browser.get("/api/v1/runs/99/precision-diffs").status_code == 404


def test_diff_of_a_running_run_is_requested(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A precision diff of a running run can be requested by page and API, in fp16 or bf16 only."""
    assert "Compare with fp32" in browser.get("/runs/1").text
    answer = browser.post("/api/v1/runs/1/precision-diffs")
    assert answer.status_code == 202
    with database.writing() as session:
        [request] = queue.renew(session, running.id, 1, 60.0).requests
        session.get_one(Run, running.id).precision = "fp32"
    assert (request.id, request.kind) == (answer.json()["id"], "precision_diff")
    rejected = browser.post("/api/v1/runs/1/precision-diffs")
    assert rejected.status_code == 409
    assert "trains in fp32: a precision diff compares fp16 or bf16" in rejected.json()["detail"]
    assert "Compare with fp32" not in browser.get("/runs/1").text
