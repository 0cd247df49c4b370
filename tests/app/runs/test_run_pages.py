"""The page of one run, as the server renders it before any script runs."""

import html
import re
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from app.files.file_names import file_name
from app.runs.run_pages import TABS
from db.database import Database
from db.files import checkpoints
from db.queue import queue, workers
from db.runs import environments, history, runs
from db.tables import CheckpointFile, Run, Status, User
from db.telemetry import series, telemetry
from db.telemetry.recording import Recording
from db.telemetry.telemetry import LogRow
from tests.app.conftest import CONFIG, CPU, DIGITS, start_run, submit
from tests.db.files.checkpoints_made import in_shards
from tests.db.telemetry.telemetry_made import make_metric, make_steps, record
from tests.halfstep.telemetry.events_made import HONEST
from tests.spool_made import checkpoint_of, event_of


def test_page_shows_the_three_counts(database: Database, running: Run, browser: TestClient) -> None:
    """Attempted, applied and skipped steps are in the header with the scale."""
    record(database, running, make_steps([1.0] * 10, skipped=[1, 2]))
    page = browser.get("/runs/1").text
    for name, value in (("step", 10), ("applied", 8), ("skipped", 2)):
        assert f'data-fact="{name}">{value}<' in page
    assert 'data-fact="scale">2<sup>18</sup>' in page
    assert "<b data-skip-count>2 skipped steps<" in page


def test_steps_without_an_optimizer_are_not_applied(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A script that logs losses without torch has no precision, and no axis of applied steps."""
    record(database, running, make_steps([1.0] * 10))
    with database.writing() as session:
        session.get_one(Run, 1).precision = ""
    page = browser.get("/runs/1").text
    assert "applied</dd>" not in page
    assert 'value="applied"' not in page


def test_no_skipped_step_is_no_alarm(running: Run, browser: TestClient) -> None:
    """The share of skipped steps has the error colour only if it is high."""
    assert "<b data-skip-count>0 skipped steps<" in browser.get("/runs/1").text


def test_a_retry_in_fp32_counts_as_applied(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """A skip with a successful retry counts once as skipped and once as applied.

    This catches counts of steps minus skips, and counts of retries that were not finite either.
    """
    config = CONFIG | {"scaler": {"retry_in_fp32": True}}
    run = start_run(database, ada, config=config)
    retries = [
        {"event": "retry", "step": step, "loss": 1.0, "grad_norm": 1.0, "applied": applied}
        for step, applied in ((1, True), (2, False), (3, True), (11, True))
    ]
    steps = make_steps([1.0] * 10, skipped=[1, 2, 3])
    record(database, run, steps, events=[*retries, *retries])
    page = browser.get("/runs/1").text
    assert 'data-fact="applied">9<' in page
    assert 'data-fact="skipped">3<' in page
    assert 'value="step" data-view="x"' in page
    assert 'value="applied"' not in page  # an axis that the charts cannot draw


def test_a_page_continues_from_its_own_state(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The page's cursor is of the same snapshot as the page, so there are no updates since."""
    record(database, running, make_steps([1.0] * 3), events=[make_metric(3, 0.5)])
    page = browser.get("/runs/1").text
    cursor = page.partition('data-cursor="')[2].partition('"')[0]
    with database.reading() as session:
        assert series.changes(session, 1, series.Cursor.parse(cursor)) is None
        assert str(history.cursor_now(session, running)).split(".")[2:] == cursor.split(".")[2:]


def test_skips_name_their_culprits(database: Database, running: Run, browser: TestClient) -> None:
    """A skip shows the scale before and after it, and its last culprit in forward order first."""
    event = {
        "event": "scaler",
        "kind": "skip",
        "step": 7,
        "optimizer": "adamw",
        "scale_before": 2.0**20,
        "scale_after": 2.0**19,
        "culprits": [{"name": "model.0.bias"}, {"name": "model.6.bias"}],
    }
    record(database, running, events=[event])
    page = browser.get("/runs/1").text
    assert "2<sup>20</sup> → 2<sup>19</sup>" in page
    assert "<code>model.6.bias</code> <span" in page
    assert "and 1 more parameter<" in page


def test_failed_run_shows_its_traceback(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A failed run's page begins with the error and its kind."""
    with database.writing() as session:
        error = "Traceback …\nValueError: batch_size is 5000"
        queue.end(
            session, 1, 1, Status.FAILED, error=error, reason="it raised", failure_kind="code"
        )
    page = browser.get("/runs/1").text
    assert "ValueError: batch_size is 5000" in page
    assert "<b>Failed.</b> An error in the code: it raised" in page


def test_banner_and_history_of_a_failed_command_have_one_sentence(
    database: Database, running: Run, browser: TestClient
) -> None:
    """For a failed command banner and history have one sentence with the exit code."""
    with database.writing() as session:
        session.get_one(Run, 1).source = "command"
        reason = "the command exited with code 3; last line: hello"
        queue.end(session, 1, 1, Status.FAILED, error="hello", reason=reason, failure_kind="code")
    page = browser.get("/runs/1").text
    assert "<b>Failed.</b> The command exited with code 3; last line: hello" in page
    assert (
        'The command exited with code 3; last line: hello <span class="tag">an error in the code<'
        in page
    )


def test_what_could_not_be_started_is_no_error_in_the_code(
    database: Database, running: Run, browser: TestClient
) -> None:
    """The reason why a run could not be started is shown once, and not as an error in the code."""
    reason = "there is no program pyhton in the PATH of this worker"
    with database.writing() as session:
        queue.end(
            session, 1, 1, Status.FAILED, error=reason, reason=reason, failure_kind="settings"
        )
    problem = browser.get("/runs/1").text.partition('role="alert"')[2].partition("<nav")[0]
    assert "<b>Failed.</b> It could not be started: there is no program pyhton" in problem
    assert problem.count("is no program pyhton") == 1


def test_checkpoint_can_be_downloaded_and_loaded(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A checkpoint shows size, hash, a link, and the line of Python that loads the file."""
    file = {"kind": "checkpoint", "size_bytes": 3_214_567, "sha256": "ab" * 32}
    event = {"step": 400, "reason": "end", "request": None, "files": [file]}
    with database.writing() as session:
        checkpoints.publish(
            session, 1, 1, checkpoint_of(event), ["runs/1/checkpoints/step-00000400.pt"]
        )
    page = browser.get("/runs/1").text
    assert "3.07 MiB" in page
    assert 'title="3,214,567 bytes"' in page
    assert 'data-copy-text="' + "ab" * 32 in page
    assert 'href="/runs/1/checkpoints/1/download"' in page
    assert "torch.load(&#39;digits-fp16-run1-step400.pt&#39;, weights_only=True)" in page


def test_a_checkpoint_shows_how_its_save_went(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A checkpoint has its save's duration, throughput and stall, or none if one is missing."""
    files = [{**HONEST["checkpoint"]["files"][0], "size_bytes": 5_000_000}]
    events = [HONEST["checkpoint"] | {"step": step, "files": files} for step in (400, 800)]
    del events[1]["stall_seconds"]
    recording = Recording(1, 1, has_begun=True, last_line=0)
    recording.take([event_of(each) for each in events])
    with database.writing() as session:
        recording.write(session, [["400.pt"], ["800.pt"]], [])
        assert checkpoints.saves(session, 1).keys() == {400}
    page = browser.get("/runs/1").text
    assert page.count('title="3.81 MiB/s">1.25 s<') == page.count(">pause 50 ms<") == 1


def test_log_and_configuration(database: Database, running: Run, browser: TestClient) -> None:
    """Lines of the log have their stream, and values that differ from their default are marked."""
    line = {"number": 1, "attempt": 1, "time": 1.0, "stream": "stderr", "text": "careful <b>"}
    with database.writing() as session:
        telemetry.record(session, 1, 1, telemetry.Flush(log_lines=[LogRow(**line)]))
    page = browser.get("/runs/1").text
    assert '<div class="stderr" data-number="1">careful &lt;b&gt;</div>' in page
    assert "<code>training.batch_size</code>" in page


def test_buttons_ask_and_lead_back(running: Run, browser: TestClient) -> None:
    """Each button of a run works as a plain form and redirects to the run."""
    for action in ("checkpoints", "pause", "cancellation", "kill"):
        answer = browser.post(f"/runs/1/{action}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs/1")
    answer = browser.post("/runs/1/resumption")
    assert answer.status_code == 409
    assert "only a paused one can be resumed" in answer.text


def test_line_that_loads_names_the_file_as_it_is_downloaded(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The line that loads a checkpoint has the cleaned file name of its download."""
    run = submit(database, ada, recipe="/my recipes/a'b.py:Net")
    with database.writing() as session:
        row = CheckpointFile(
            run_id=run.id,
            attempt=1,
            step=5,
            kind="checkpoint",
            key="a.pt",
            size_bytes=1,
            sha256="ab",
            reason="end",
        )
        session.add(row)
        session.flush()
    assert file_name(run, row) == "my-recipes-a-b.py-Net-fp16-run1-step5.pt"
    assert file_name(run, row) in browser.get(f"/runs/{run.id}").text


def test_a_state_in_shards_is_one_row(
    database: Database, running: Run, browser: TestClient
) -> None:
    """A sharded state is one row with the size of all its files; it can be resumed from, but its
    parts cannot be downloaded.
    """
    event = in_shards(40, ranks=8)
    with database.writing() as session:
        keys = [file["kind"] for file in event["files"]]
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(event), keys)
    page = browser.get(f"/runs/{running.id}").text
    assert "state in 8 shards" in page
    assert 'title="910 bytes"' in page
    assert "Fork from this checkpoint" in page
    assert "torch.load" not in page
    assert "/download" not in page


def test_parent_and_child_link_each_other(
    database: Database, ada: User, running: Run, browser: TestClient
) -> None:
    """A run names its parent, and the parent's checkpoint names the runs that started from it."""
    file = {"kind": "checkpoint", "path": "", "size_bytes": 1, "sha256": "aa"}
    event = {"step": 40, "reason": "interval", "request": None, "files": [file]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(event), ["key"])
    fork = submit(database, ada, parent_id=running.id, parent_step=40)
    page = browser.get(f"/runs/{fork.id}").text
    assert 'from <a href="/runs/1">run 1</a>, step 40' in page
    assert 'data-fact="step">40</b>' in page  # its checkpoint's, until it has its own
    page = browser.get("/runs/1").text
    assert re.search(rf'Used by <a href="/runs/{fork.id}"\s+title="{fork.name}">', page)


def test_codes_for_a_terminal_are_not_shown(
    database: Database, running: Run, browser: TestClient
) -> None:
    """ANSI colour codes in stderr are removed from the log."""
    line = {"number": 1, "attempt": 1, "time": 1.0, "stream": "stderr"}
    with database.writing() as session:
        lines = [line | {"text": "\x1b[1;31mWarning\x1b[0m: \x1b[2Kslow"}]
        telemetry.record(
            session, running.id, 1, telemetry.Flush(log_lines=[LogRow(**each) for each in lines])
        )
    page = browser.get(f"/runs/{running.id}").text
    assert '<div class="stderr" data-number="1">Warning: slow</div>' in page
    assert "\x1b" not in page


WORKLOAD = {"event": "workload", "step": 0, "examples": 128, "tokens": 4096, "device": "NVIDIA"}


def test_updates_appear_within_a_second(
    database: Database, running: Run, browser: TestClient, script: TestClient
) -> None:
    """The page has examples, tokens and the share of the device's peak per second; unknown ones are
    left out.
    """
    steps = make_steps([1.0] * 10)
    steps["step_us"], steps["data_us"] = 4000, 1000
    plain = WORKLOAD | {"tokens": None, "flops": None, "peak_flops": None}
    record(database, running, steps, events=[plain])
    page = browser.get("/runs/1").text
    assert "32,000 examples/s" in page
    assert "MFU" not in page
    known = WORKLOAD | {"flops": 1e12, "peak_flops": 1e15}
    record(database, running, events=[known])
    page = browser.get("/runs/1").text
    assert 'tokens/s · <a class="term" href="/help/glossary#mfu">MFU</a> 25 %' in page
    assert "Input-bound</a>:</b> 100 % of the last 10 steps waited for data" in page
    summary = script.get("/api/v1/runs/1").json()
    assert summary["examples_per_second"] == 250 * 128
    assert summary["tokens_per_second"] == 250 * 4096
    assert summary["utilisation"] == 0.25
    assert (summary["data_wait"]["waited"], summary["data_wait"]["share"]) == (10, 0.25)
    with database.writing() as session:
        runs.set_status(session, runs.get(session, running.id, lock=True), Status.QUEUED)
    page = browser.get(f"/runs/{running.id}").text
    assert "<b>Waiting.</b> No device is free" in page


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"spike": {"threshold": 10.0, "window_steps": 2000}}, "the first 2,000 are not examined"),
        ({"spike": {"threshold": None, "window_steps": 100}}, "Detection is off"),
        ({}, "Not examined"),
    ],
)
def test_a_page_without_spikes_says_what_was_examined(
    database: Database,
    running: Run,
    browser: TestClient,
    config: dict[str, Any],
    words: str,
) -> None:
    """Without spikes the page says which steps detection does not cover."""
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.config = {**run.config, **config}
    assert words in browser.get(f"/runs/{running.id}").text


@pytest.mark.parametrize(
    ("precision", "words"),
    [("fp16", ">None.<"), ("bf16", "None: without a loss scaler no step is skipped.")],
)
def test_a_run_without_skips_explains_them_by_its_scaler(
    database: Database, running: Run, browser: TestClient, precision: str, words: str
) -> None:
    """For a bf16 run without skips the page says nothing about a scale, because bf16 has no
    scaler.
    """
    with database.writing() as session:
        run = session.get_one(Run, running.id)
        run.precision, run.config = precision, {**run.config, "precision": precision}
    steps = make_steps([1.0] * 5)
    if precision == "bf16":
        steps["scale"] = np.nan
    record(database, running, steps)
    assert words in browser.get(f"/runs/{running.id}").text


def test_spikes_are_listed_with_the_step_of_the_rollback(
    database: Database, running: Run, browser: TestClient, script: TestClient
) -> None:
    """Spikes are on the page and in the series of the chart; without spikes the page says so."""
    assert "Not examined" in browser.get("/runs/1").text  # by this configuration
    spikes = [
        {"event": "spike", "step": 7, "loss": 20.5, "z": 99.5, "rolled_back_to": 5},
        {"event": "spike", "step": 9, "loss": "NaN", "z": "Infinity"},
    ]
    record(database, running, make_steps([1.0] * 10), events=spikes)
    page = browser.get("/runs/1").text
    assert '<td class="number">20.5</td><td class="number">99.5</td><td>step 5</td>' in page
    assert '<td class="number">NaN</td><td class="number">∞</td><td>–</td>' in page
    assert script.get("/api/v1/runs/1/series").json()["spikes"] == [
        {"step": 7, "loss": 20.5, "z": 99.5, "rolled_back_to": 5},
        {"step": 9, "loss": "NaN", "z": "Infinity", "rolled_back_to": None},
    ]


def test_the_tab_in_the_address_is_shown_first(running: Run, browser: TestClient) -> None:
    """The tab in the address is shown first, and every panel is in the page."""
    for query, shown in (("", "charts"), ("?tab=log", "log"), ("?tab=<b>", "charts")):
        page = browser.get(f"/runs/1{query}").text
        assert page.count(" data-shown>") == 1
        assert f'data-panel="{shown}" data-shown>' in page
        assert page.count('class="panel"') == len(TABS)
        assert all(f'href="#{name}" id="tab-{name}"' in page for name in TABS)


def test_changed_settings_are_next_to_the_facts(
    database: Database, ada: User, offered: None, browser: TestClient
) -> None:
    """The configuration tab shows the number of changed settings, and the API has each with its
    default.
    """
    changed = {"batch_size": 96, "steps": 401}
    config = {**CONFIG, "training": {**CONFIG["training"], **changed}, "strange": {"field": 1}}
    start_run(database, ada, config=config)
    page = browser.get("/runs/1").text
    assert 'data-tab="configuration">Configuration <span class="chip">2 changed</span>' in page
    result = browser.get("/api/v1/runs/1").json()["changed_settings"]
    assert {(each["path"], each["value"], each["default"]) for each in result} == {
        ("training.batch_size", 96, 64),
        ("training.steps", 401, 400),
    }


def test_the_environment_is_shown(database: Database, running: Run, browser: TestClient) -> None:
    """The page has machine, versions and git state once the run has started, and the API has their
    texts.

    A recipe that changed since is noted, but not an equal or unknown one.
    """
    assert "It is recorded when the run starts" in browser.get("/runs/1").text
    assert browser.get("/api/v1/runs/1/environment").status_code == 404
    file = {"path": "/r.py", "sha256": "aa", "size_bytes": 6, "is_cut": False}
    git = {"commit": "c0ffee", "is_dirty": True, "untracked": ["<b>"], "untracked_count": 1}
    content = {
        **{"worker": "w1", "host": "host", "platform": "Linux", "devices": [CPU], "folder": "/"},
        **{"versions": {"torch": "2.9", "driver": None}, "command": ["python", "r.py"]},
        **{"file": file, "git": {**git, "is_cut": False}},
    }
    with database.writing() as session:
        environments.record(session, 1, 1, content, environments.Texts("LR = 1", "-a\n+b"))
    page = browser.get("/runs/1").text
    for text in ("python r.py", "c0ffee</code>, with changes", "torch <code>2.9<", "&lt;b&gt;"):
        assert text in page
    result = browser.get("/api/v1/runs/1/environment").json()
    assert (result["source"], result["diff"], result["has_other_source"]) == (
        "LR = 1",
        "-a\n+b",
        False,
    )
    assert result["submit_command"] in html.unescape(page)
    assert "halfstep run reproduce" not in page
    for digest, is_other in (("aa", False), ("bb", True)):
        with database.writing() as session:
            workers.offer(session, 1, [DIGITS | {"sha256": digest}])
        page = browser.get("/runs/1").text
        assert ("The recipe's source has changed since" in page.replace("&#39;", "'")) is is_other
