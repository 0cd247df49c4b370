"""A comparison of precisions: queueing the same run in each, and the table of results."""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from app.compare import comparison
from app.submission.config_schema import flat
from db.database import Database
from db.files import checkpoints
from db.queue import claims, queue, workers
from db.runs import runs
from db.settings import Settings
from db.tables import Run, Status, User
from tests.app.compare.seeds_made import offer_seeds
from tests.app.conftest import CONFIG, CPU, DIGITS, SCHEMA, submit
from tests.app.submission.new_run_pages_made import FORM
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_replay,
    make_skip,
    make_steps,
    record,
)
from tests.spool_made import checkpoint_of

LABELS = ["fp32", "fp16 without scaler", "fp16", "bf16"]


def test_one_call_queues_four(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """One request queues four runs of a group that differ in precision and scaler.enabled only."""
    source = submit(database, ada, name="mine", priority=3)
    answer = script.post(f"/api/v1/runs/{source.id}/comparison")
    assert answer.status_code == 201
    assert [each["label"] for each in answer.json()["runs"]] == LABELS
    assert answer.json()["differences"] == {
        "precision": ["fp32", "fp16", "fp16", "bf16"],
        "scaler.enabled": [False, False, True, False],
    }
    with database.reading() as session:
        found = [runs.get(session, run_id) for run_id in (2, 3, 4, 5)]
        assert {run.group_id for run in found} == {2}
        assert {run.priority for run in found} == {3}
        assert [run.name for run in found] == [f"mine {label}" for label in LABELS]
        assert runs.get(session, source.id).group_id is None


def test_several_seeds_are_a_group_each(database: Database, ada: User, script: TestClient) -> None:
    """Each seed is a group of its own; seeds continue from the run's seed, or from 0 after the
    largest one, and their parity can be tested at once.
    """
    offer_seeds(database)
    submit(database, ada, config=CONFIG | {"training": {"steps": 5, "seed": 2**32 - 2}})
    answer = script.post("/api/v1/runs/1/comparison", json={"seeds": 3}).json()
    assert answer["queued"] == list(range(2, 14))
    assert (answer["id"], [each["label"] for each in answer["runs"]]) == (2, LABELS)
    with database.reading() as session:
        found = [runs.get(session, run_id) for run_id in answer["queued"]]
        seeds = [2**32 - 2] * 4 + [2**32 - 1] * 4 + [0] * 4
        assert [run.config["training"]["seed"] for run in found] == seeds
        assert [run.group_id for run in found] == [2] * 4 + [6] * 4 + [10] * 4
        assert found[-1].name == "digits bf16 seed 0"
    query = {"runs": ",".join(map(str, answer["queued"])), "metric": "val/accuracy"}
    parity = script.get("/api/v1/comparison/parity", params=query).json()
    assert [group["result"]["pairs"] for group in parity["groups"]] == [3, 3, 3]
    assert parity["groups"][0]["result"]["reason"].startswith(
        "not finished: run 2 (queued), run 3 (queued)"
    )


def test_the_form_leads_to_the_parity_of_its_seeds(
    database: Database, ada: User, browser: TestClient
) -> None:
    """The form leads to the parity with its metric and margin, or with one seed to the group."""
    offer_seeds(database)
    submit(database, ada)
    page = browser.get("/runs/1").text
    assert 'name="seeds" value="3"' in page
    values = {"seeds": "2", "metric": "val/accuracy", "margin": "0.01"}
    location = browser.post("/runs/1/comparison", data=values).headers["location"]
    assert location == ("/compare?runs=2,3,4,5,6,7,8,9&metric=val%2Faccuracy&margin=0.01#parity")
    page = browser.get(location).text
    assert '<option value="val/accuracy" selected>' in page
    assert "None of these runs has" not in page
    assert "Unknown for fp16: not finished: run 2 (queued), run 4 (queued), run 6 (queued)" in page
    one = browser.post("/runs/1/comparison", data={"seeds": "1", "metric": "loss", "margin": ""})
    assert one.headers["location"] == "/groups/10"
    for field, value, text in (("seeds", "9", "at most 8"), ("margin", "-1", "more than 0")):
        refused = browser.post("/runs/1/comparison", data={**values, field: value})
        assert (refused.status_code, text in refused.text) == (422, True)
    refused = browser.post("/api/v1/runs/1/comparison", json={"seeds": 0})
    assert refused.json()["errors"] == {"seeds": "0: allowed: at least 1"}


def test_a_precision_that_no_worker_offers_is_left_out(
    database: Database, ada: User, script: TestClient, browser: TestClient
) -> None:
    """A precision that no worker offers is named and not queued, since its run would wait forever.

    Without a worker all four precisions are queued.
    """
    old = {"devices": [CPU | {"bf16": False}], "recipes": [DIGITS], "versions": {}}
    new = {"devices": [CPU], "recipes": [DIGITS | {"name": "gpt"}], "versions": {}}
    with database.writing() as session:
        worker = workers.register(session, name="old", host="host", pid=1, **old)
        workers.register(session, name="new", host="host", pid=2, **new)
        other = workers.register(session, name="gone", host="host", pid=3, **old | new)
        workers.stop(session, other.id)
    submit(database, ada)
    answer = script.post("/api/v1/runs/1/comparison").json()
    assert [each["label"] for each in answer["runs"]] == LABELS[:3]
    assert answer["left_out"] == ["bf16"]
    assert "no worker that was up offers it: bf16" in browser.get(f"/groups/{answer['id']}").text

    with database.writing() as session:
        workers.stop(session, worker.id)
    answer = script.post("/api/v1/runs/1/comparison").json()
    assert [each["label"] for each in answer["runs"]] == LABELS
    assert answer["left_out"] == []
    assert "no worker that was up" not in browser.get(f"/groups/{answer['id']}").text


def test_tf32_is_a_column_where_all_devices_have_it(
    database: Database, ada: User, script: TestClient
) -> None:
    """TF32 is a column if all devices support it; its fp32 column then runs without TF32. Otherwise
    the column is left out, and no precision is reported as missing.
    """
    gpu = CPU | {"kind": "cuda", "name": "H100", "compute_capability": "9.0", "tf32": True}
    offer: dict[str, Any] = {"recipes": [DIGITS], "versions": {}}
    with database.writing() as session:
        workers.register(session, name="gpu", host="host", pid=1, devices=[gpu], **offer)
    submit(database, ada, config={"precision": "fp16", "training": {"steps": 5, "tf32": True}})
    answer = script.post("/api/v1/runs/1/comparison").json()
    assert [each["label"] for each in answer["runs"]] == ["fp32", "TF32", *LABELS[1:]]
    assert answer["differences"]["precision"] == ["fp32", "fp32", "fp16", "fp16", "bf16"]
    assert answer["differences"]["training.tf32"] == [False, True, True, True, True]

    older = {name: value for name, value in gpu.items() if name != "tf32"}  # as before
    with database.writing() as session:
        workers.register(session, name="old", host="host", pid=2, devices=[gpu, older], **offer)
    answer = script.post("/api/v1/runs/1/comparison").json()
    assert [each["label"] for each in answer["runs"]] == LABELS
    assert answer["left_out"] == []


def test_fp8_is_offered_where_devices_have_it(
    database: Database, ada: User, offered: None, script: TestClient, browser: TestClient
) -> None:
    """fp8 appears in columns, forms and workers only if a device has it; a run that no worker
    can train states the reason in the queue.
    """
    fields = SCHEMA["properties"]
    precision = fields["precision"] | {"enum": [*fields["precision"]["enum"], "fp8"]}
    schema = SCHEMA | {"properties": fields | {"precision": precision}}
    recipes = [DIGITS | {"schema": schema}]
    gpu = CPU | {"kind": "cuda", "name": "H100", "compute_capability": "9.0"}
    submit(database, ada)
    for has_fp8 in (False, True):
        with database.writing() as session:
            offer: dict[str, Any] = {"recipes": recipes, "devices": [gpu | {"fp8": has_fp8}]}
            workers.register(session, name="w1", host="host", pid=1, versions={}, **offer)
        for form in ("/runs/new", "/sweeps/new"):
            assert ('name="precision" value="fp8"' in browser.get(form).text) is has_fp8
        answer = script.post("/api/v1/runs/1/comparison").json()
        labels = [each["label"] for each in answer["runs"]]
        assert labels == [*LABELS, *(["fp8"] if has_fp8 else [])]
        assert answer["left_out"] == []
    with database.writing() as session:
        offer = {"recipes": recipes, "devices": [gpu]}
        workers.register(session, name="w1", host="host", pid=1, versions={}, **offer)
    queued = script.post("/api/v1/runs", json={"recipe": "digits", "config": {"precision": "fp8"}})
    assert queued.json()["waiting"] == (
        "no worker that is up has devices for fp8: start one that can take it, or cancel the run"
    )
    assert "<th>fp8</th>" in browser.get("/workers/1").text


def test_button_leads_to_the_group(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The button on a run's page queues its comparison and opens it; all its runs link there."""
    submit(database, ada)
    answer = browser.post("/runs/1/comparison")
    assert (answer.status_code, answer.headers["location"]) == (303, "/groups/2")
    page = browser.get("/groups/2").text
    assert all(f">{label}</a>" in page for label in LABELS)
    assert "<code>scaler.enabled</code>" in page
    assert "<code>training.batch_size</code>" not in page
    assert 'href="/groups/2"' in browser.get("/runs/3").text


def test_a_comparison_on_a_cpu_says_so(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The page notes that fp16 on a CPU differs from fp16 on a GPU, even before the runs start."""
    submit(database, ada)
    browser.post("/runs/1/comparison")
    note = "On a CPU, autocast leaves more in fp16 than on CUDA"
    assert note in browser.get("/groups/2").text
    legend = browser.get("/groups/2").text.partition("data-legend>")[2].partition("</table>")[0]
    assert ">fp16 without scaler</a>" in legend
    gpu = CPU | {"kind": "cuda", "name": "H100"}
    offer: dict[str, Any] = {"devices": [gpu], "recipes": [DIGITS], "versions": {}}
    with database.writing() as session:
        workers.register(session, name="gpu", host="host", pid=2, **offer)
    assert note not in browser.get("/groups/2").text
    browser.post("/runs/1/cancellation")
    _train(database, 2, seconds=2.0, losses=[2.0])
    assert note in browser.get("/groups/2").text


def test_a_comparison_over_several_devices_says_so(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """Each run of a comparison names its device if there are several devices."""
    gpu = CPU | {"kind": "cuda", "name": "H100"}
    both = [gpu | {"index": 0}, gpu | {"index": 1}]
    with database.writing() as session:
        workers.register(
            session, name="gpu", host="host", pid=2, devices=both, recipes=[DIGITS], versions={}
        )
    submit(database, ada, devices_per_node=2)
    browser.post("/runs/1/comparison")
    browser.post("/runs/1/cancellation")
    note = "trained on different devices"

    def devices() -> list[str]:
        return [run["device"] for run in browser.get("/api/v1/groups/2").json()["runs"]]

    _train(database, 2, seconds=2.0, losses=[2.0], devices=[0, 1])
    assert devices() == ["CPU, a removed device", "", "", ""]
    assert note not in browser.get("/groups/2").text
    _train(database, 3, seconds=2.0, losses=[2.0], worker_id=2, devices=[0, 1])
    assert devices()[1] == "2 × H100"
    page = browser.get("/groups/2").text
    assert note in page
    assert "<td>2 × H100</td>" in page


def test_numbers_have_their_ratio_to_fp32(
    database: Database, settings: Settings, ada: User, offered: None, browser: TestClient
) -> None:
    """Time and memory come from ended runs, ratios from finite numbers; a NaN is called one."""
    submit(database, ada)
    browser.post("/runs/1/comparison")
    browser.post("/runs/1/cancellation")
    _train(database, 2, seconds=2.0, losses=[2.0, 1.0])
    _train(database, 3, seconds=3.0, losses=[2.0, np.nan])
    _train(database, 4, seconds=6.0, losses=[2.0, 1.5], skipped=[1], end=False)

    with database.reading() as session:
        columns = comparison.of_group(session, 2, settings).columns
    fp32, bare, fp16, bf16 = (column.figures for column in columns)
    assert fp32["run/seconds"] == comparison.Figure(2.0, 1.0)
    assert bare["run/seconds"] == comparison.Figure(3.0, 1.5)
    assert math.isnan(bare["loss"].value or 0)
    assert bare["loss"].ratio is None
    assert fp16["run/seconds"] == comparison.Figure(None, None)
    assert fp16["loss"] == comparison.Figure(1.5, 1.5)
    assert fp16["val/accuracy"] == comparison.Figure(0.5, 1.0)
    assert bf16["loss"] == comparison.Figure(None, None)

    # A run's own page has its group's table, and its runs have the ratios in any comparison.
    for address in ("/groups/2", "/runs/2", "/runs/5", "/compare?runs=3,2"):
        page = browser.get(address).text
        assert re.search(r"3 s\s*<small>× 1.5</small>", page)
        assert "NaN" in page
    assert "In other precisions" not in browser.get("/runs/1").text
    for ids in ("3,4", "1,2,3"):  # without fp32, and with a run of another group
        assert "<small>×" not in browser.get(f"/compare?runs={ids}").text
    assert browser.get("/api/v1/groups/2").json()["runs"][1]["figures"]["loss"]["value"] == "NaN"


def test_configuration_that_is_no_longer_allowed_is_rejected(
    database: Database, ada: User, offered: None, script: TestClient
) -> None:
    """A comparison of a configuration that is not allowed any more queues nothing and
    names the field.
    """
    config: dict[str, Any] = {"precision": "fp16", "training": {"steps": 5, "batch_size": 5000}}
    submit(database, ada, config=config)
    answer = script.post("/api/v1/runs/1/comparison")
    assert answer.status_code == 422
    assert "training.batch_size" in answer.text
    assert [run["id"] for run in script.get("/api/v1/runs").json()["runs"]] == [1]


def test_group_that_there_is_not(database: Database, ada: User, browser: TestClient) -> None:
    """The page of a run that was not compared has no link to a group."""
    submit(database, ada)
    assert browser.get("/groups/1").status_code == 404


def test_a_fork_with_a_module_in_fp32_is_one_click_away(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A skip links to a form with its module in fp32, from the last checkpoint before it; the
    fork is compared with its parent by step time, skips and settings, as ratios.
    """
    replay = make_replay(7, direction="forward")
    record(database, running, make_steps([1.0] * 9, skipped=[7]), events=[make_skip(7), replay])
    with database.writing() as session:
        for step in (5, 8):
            file = {"kind": "checkpoint", "path": "p", "size_bytes": 1, "sha256": "0" * 64}
            saved = {"step": step, "reason": "interval", "files": [file]}
            checkpoints.publish(session, running.id, 1, checkpoint_of(saved), ["key"])
    page = browser.get("/runs/1").text.replace("&amp;", "&")
    link = "/runs/new?from=1&fp32=model.head&before=7"
    assert page.count(f'href="{link}"') == 2
    form = browser.get(link).text
    assert 'name="modules.fp32" value="model.head"' in form
    assert "Starts from the checkpoint at step 5 of" in form
    assert 'name="compared_with" value="1"' in form

    place = {"parent_id": "1", "parent_step": "5", "compared_with": "1", "modules.fp32": "a, b"}
    assert browser.post("/runs", data=FORM | place).headers["location"] == "/runs/2"
    with database.reading() as session:
        assert [runs.get(session, each).group_id for each in (1, 2)] == [1, 1]
    group = browser.get("/api/v1/groups/1").json()
    assert [each["label"] for each in group["runs"]] == ["fp16", "fp16, a and b in fp32"]
    assert group["differences"] == {"modules.fp32": [[], ["a", "b"]]}
    assert group["left_out"] == []
    assert group["runs"][0]["figures"]["run/step_ms"]["value"] > 0
    page = browser.get("/groups/1").text
    assert "digits, 2 runs" in page
    assert "Time per step" in page
    assert 'href="/groups/1"' in browser.get("/runs/1").text


def test_the_comparison_shows_cost_and_gain_of_a_module_in_fp32(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The finding announces the comparison, which has the step time and the skips of both runs."""
    lost = [3, 7]
    replay = make_replay(7, direction="forward")
    steps = make_steps([1.0] * 9, skipped=lost)
    steps["step_us"] = 100_000
    record(database, running, steps, events=[*make_events(lost), replay])
    [finding] = browser.get("/api/v1/runs/1/findings").json()["findings"]
    promised = "shows the extra time and the skips avoided."
    assert finding["module"] == "model.head"
    assert finding["text"].endswith(promised)
    assert promised in browser.get("/runs/1").text
    with database.writing() as session:
        queue.end(session, 1, 1, Status.FINISHED)

    fork = {"compared_with": "1", "modules.fp32": "model.head"}
    assert browser.post("/runs", data=FORM | fork).headers["location"] == "/runs/2"
    with database.writing() as session:
        offer: dict[str, Any] = {"recipes": ["digits"], "precisions": ["fp16"]}
        claimed = claims.claim(session, 1, lease_seconds=60.0, free_devices=(0,), **offer)
        assert claimed is not None
        queue.start(session, claimed.id, claimed.attempt)
    steps = make_steps([1.0] * 9)
    steps["step_us"] = 150_000
    record(database, claimed, steps)

    group = browser.get("/api/v1/groups/1").json()
    assert [each["label"] for each in group["runs"]] == ["fp16", "fp16, model.head in fp32"]
    times = [each["figures"]["run/step_ms"] for each in group["runs"]]
    assert times == [{"value": 100, "ratio": 1}, {"value": 150, "ratio": 1.5}]
    assert [each["run"]["skipped"] for each in group["runs"]] == [2, 0]
    for address in ("/groups/1", "/runs/1", "/runs/2"):
        page = browser.get(address).text
        time, skipped = (_cells(page, row) for row in ("run/step_ms", "skipped"))
        assert time == ["Time per step", "100 ms the best × 1", "150 ms × 1.5"]
        assert skipped == ["Skipped", "2 22.2 % of its steps", "0 the best"]


def test_without_a_checkpoint_the_fork_starts_over(running: Run, browser: TestClient) -> None:
    """Without a checkpoint the form of the fork has the module in fp32, and starts over."""
    form = browser.get("/runs/new?from=1&fp32=model.head&before=7").text
    assert "Starts from the checkpoint" not in form
    assert 'name="modules.fp32" value="model.head"' in form


def test_runs_that_cannot_be_compared_are_named(
    database: Database, ada: User, offered: None, script: TestClient, monkeypatch: Any
) -> None:
    """A missing run, a run of another recipe and one with many variants are named."""
    submit(database, ada, recipe="gpt")
    submit(database, ada)

    def answer(other: int) -> str:
        posted = script.post("/api/v1/runs", json={"recipe": "digits", "compared_with": other})
        return str(posted.json().get("errors", {}).get("compared_with", posted.status_code))

    assert answer(77) == "there is no run 77"
    assert answer(1) == "run 1 is of gpt; allowed: a run of digits"
    monkeypatch.setattr("db.runs.groups.MOST_COMPARED", 2)
    assert answer(2) == "201"
    assert answer(2) == "the group of run 2 already has 2 runs, the maximum"


def _cells(page: str, row: str) -> list[str]:
    """Return the texts of a row of the comparison's table."""
    [inside] = re.findall(rf'<tr data-key="{row}">(.*?)</tr>', page, re.DOTALL)
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", inside, re.DOTALL)
    return [" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in cells]


def _train(
    database: Database,
    run_id: int,
    *,
    seconds: float,
    losses: list[float],
    skipped: list[int] | None = None,
    end: bool = True,
    worker_id: int = 1,
    devices: Collection[int] = (0,),
) -> Run:
    offer = {"recipes": ["digits"], "precisions": ["fp32", "fp16", "bf16"]}
    with database.writing() as session:
        run = claims.claim(session, worker_id, lease_seconds=60.0, free_devices=devices, **offer)
        assert run is not None
        assert run.id == run_id
        queue.start(session, run_id, 1)
    steps, skips = make_steps(losses, skipped=skipped or []), make_events(skipped or [])
    metrics = [make_metric(2, 0.5), make_metric(2, seconds, "run/seconds")]
    record(database, run, steps, events=[*skips, *metrics])
    if end:
        with database.writing() as session:
            queue.end(session, run_id, 1, Status.FINISHED)
    return run


def test_settings_are_counted_as_on_the_page_of_a_run(
    database: Database, ada: User, browser: TestClient
) -> None:
    """The name of the recipe, which the comparison shows too, does not count as a setting."""
    for _ in range(2):
        submit(database, ada)
    configuration = browser.get("/runs/1").text.partition("<th>Path</th>")[2]
    number = configuration.partition("</table>")[0].count("</tr>") - 1  # its header
    assert number == len(flat(CONFIG))
    assert f"All settings ({number})" in browser.get("/compare?runs=1,2").text
